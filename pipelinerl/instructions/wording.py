"""Instructions on the wording of an answer: its case, commas, beginning and end, and language.

IFEval's case instructions ask for English. Here they check for Latin letters, since no program can detect the language
of a few words in capitals.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from pipelinerl.instructions import languages
from pipelinerl.instructions.instruction import Text
from pipelinerl.instructions.text import script_shares

#: The minimum share of Latin letters for a text to count as possibly English.
_MOSTLY: Final = 0.9


class AllCapitals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`change_case:english_capital`."""

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return "Your entire response should be in English, and in all capital letters."

    def follows(self, answer: str) -> bool:
        """Return whether all letters are capitals, and mostly Latin."""
        return answer.isupper() and _is_latin(answer)


class AllLowercase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`change_case:english_lowercase`."""

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return (
            "Your entire response should be in English, and in all lowercase letters. No capital letters are allowed."
        )

    def follows(self, answer: str) -> bool:
        """Return whether all letters are lowercase, and mostly Latin."""
        return answer.islower() and _is_latin(answer)


class NoComma(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`punctuation:no_comma`."""

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return "In your entire response, refrain from the use of any commas."

    def follows(self, answer: str) -> bool:
        """Return whether the answer has no comma."""
        return "," not in answer


class EndPhrase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`startend:end_checker`."""

    end_phrase: Text

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return f'Finish your response with this exact phrase: "{self.end_phrase}" No other words should follow it.'

    def follows(self, answer: str) -> bool:
        """Return whether the answer ends with the phrase, ignoring case and quotation marks."""
        return answer.strip().strip('"').lower().endswith(self.end_phrase.strip().strip('"').lower())


class QuotationMarks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`startend:quotation`."""

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return "Wrap your entire response with double quotation marks."

    def follows(self, answer: str) -> bool:
        """Return whether double quotation marks enclose a non-empty text."""
        text = answer.strip()
        return len(text) > 2 and text[0] == text[-1] == '"'


class TwoResponses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`combination:two_responses`."""

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        return "Give two different responses. Responses and only responses should be separated by six asterisks: ******"

    def follows(self, answer: str) -> bool:
        """Return whether there are two different responses."""
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
        """The prompt for a model."""
        return f'First repeat this request word for word without change: "{self.prompt_to_repeat}" Then answer it.'

    def follows(self, answer: str) -> bool:
        """Return whether the answer begins with the request, ignoring case."""
        return answer.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class ResponseLanguage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`language:response_language`, by its ISO 639-1 code."""

    language: Text

    def __post_init__(self) -> None:
        languages.check(self.language)

    @property
    def sentence(self) -> str:
        """The prompt for a model."""
        name = languages.LANGUAGES[self.language].name
        return f"Your entire response should be in {name}, no other language is allowed."

    def follows(self, answer: str) -> bool:
        """Return whether the answer is in the required language."""
        return languages.is_in(answer, self.language)


def _is_latin(text: str) -> bool:
    return script_shares(text).get("LATIN", 0.0) >= _MOSTLY
