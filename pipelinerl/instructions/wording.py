"""Instructions on how an answer is put: its case, its commas, how it begins and ends, in which language it is.

The case instructions are called English's in IFEval; here they ask for Latin letters, since no program can tell the
language of a few words in capitals.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from pipelinerl.instructions import languages
from pipelinerl.instructions.instruction import Text
from pipelinerl.instructions.text import script_shares

#: Of the letters, so many are Latin in a text that may be English.
_MOSTLY: Final = 0.9


class AllCapitals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`change_case:english_capital`."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return "Your entire response should be in English, and in all capital letters."

    def follows(self, answer: str) -> bool:
        """Is no letter small?"""
        return answer.isupper() and _is_latin(answer)


class AllLowercase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`change_case:english_lowercase`."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return (
            "Your entire response should be in English, and in all lowercase letters. No capital letters are allowed."
        )

    def follows(self, answer: str) -> bool:
        """Is no letter a capital?"""
        return answer.islower() and _is_latin(answer)


class NoComma(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`punctuation:no_comma`."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return "In your entire response, refrain from the use of any commas."

    def follows(self, answer: str) -> bool:
        """Is there none?"""
        return "," not in answer


class EndPhrase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`startend:end_checker`."""

    end_phrase: Text

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return f'Finish your response with this exact phrase: "{self.end_phrase}" No other words should follow it.'

    def follows(self, answer: str) -> bool:
        """Does it end so, but for quotation marks and case?"""
        return answer.strip().strip('"').lower().endswith(self.end_phrase.strip().strip('"').lower())


class QuotationMarks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`startend:quotation`."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return "Wrap your entire response with double quotation marks."

    def follows(self, answer: str) -> bool:
        """Do double quotation marks stand around something?"""
        text = answer.strip()
        return len(text) > 2 and text[0] == text[-1] == '"'


class TwoResponses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`combination:two_responses`."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return "Give two different responses. Responses and only responses should be separated by six asterisks: ******"

    def follows(self, answer: str) -> bool:
        """Are there two, and do they differ?"""
        responses = [response.strip() for response in answer.split("******")]
        if not all(responses[1:-1]):
            return False
        given = [response for response in responses if response]
        return len(given) == 2 and given[0] != given[1]


class RepeatPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`combination:repeat_prompt`."""

    prompt_to_repeat: Text

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        return f'First repeat this request word for word without change: "{self.prompt_to_repeat}" Then answer it.'

    def follows(self, answer: str) -> bool:
        """Does it begin with the request, but for case?"""
        return answer.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class ResponseLanguage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`language:response_language`, by its ISO 639-1 code."""

    language: Text

    def __post_init__(self) -> None:
        languages.check(self.language)

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        name = languages.LANGUAGES[self.language].name
        return f"Your entire response should be in {name}, no other language is allowed."

    def follows(self, answer: str) -> bool:
        """Is it in that language?"""
        return languages.is_in(answer, self.language)


def _is_latin(text: str) -> bool:
    return script_shares(text).get("LATIN", 0.0) >= _MOSTLY
