"""Instructions on the wording of an answer: its case, commas, beginning and end, and language.

IFEval's case instructions require English. Here they check for Latin letters, since no program can detect the language
of a few words in capitals.

A language is detected by its script. Among languages that share the script, `py3langid` decides (Barbaresi; the model
of Lui and Baldwin 2012). This library is an extra, `pip install -e '.[languages]'`, and takes seconds to load.
Without it, languages that share a script are rejected. A text without letters matches no language.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from pipelinerl.plugins.instructions.instruction import Instruction, Text, script_shares

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

#: Minimum share of Latin letters in a text that may be English.
_MOSTLY: Final = 0.9


class AllCapitals(Instruction, frozen=True, tag="change_case:english_capital"):
    """The answer must be in English, in capital letters only."""

    sentence: ClassVar = "Your entire response should be in English, and in all capital letters."

    def follows(self, answer: str) -> bool:
        return answer.isupper() and _is_latin(answer)


class AllLowercase(Instruction, frozen=True, tag="change_case:english_lowercase"):
    """The answer must be in English, in lowercase letters only."""

    sentence: ClassVar = (
        "Your entire response should be in English, and in all lowercase letters. No capital letters are allowed."
    )

    def follows(self, answer: str) -> bool:
        return answer.islower() and _is_latin(answer)


class NoComma(Instruction, frozen=True, tag="punctuation:no_comma"):
    """The answer must not contain commas."""

    sentence: ClassVar = "In your entire response, refrain from the use of any commas."

    def follows(self, answer: str) -> bool:
        return "," not in answer


class EndPhrase(Instruction, frozen=True, tag="startend:end_checker"):
    """The answer must end with a phrase, ignoring case and quotation marks."""

    sentence: ClassVar = 'Finish your response with this exact phrase: "{end_phrase}" No other words should follow it.'
    end_phrase: Text

    def follows(self, answer: str) -> bool:
        return answer.strip().strip('"').lower().endswith(self.end_phrase.strip().strip('"').lower())


class QuotationMarks(Instruction, frozen=True, tag="startend:quotation"):
    """The answer must be a non-empty text in double quotation marks."""

    sentence: ClassVar = "Wrap your entire response with double quotation marks."

    def follows(self, answer: str) -> bool:
        text = answer.strip()
        return len(text) > 2 and text[0] == text[-1] == '"'


class TwoResponses(Instruction, frozen=True, tag="combination:two_responses"):
    """Require two different responses with six asterisks between them."""

    sentence: ClassVar = (
        "Give two different responses. Responses and only responses should be separated by six asterisks: ******"
    )

    def follows(self, answer: str) -> bool:
        responses = [response.strip() for response in answer.split("******")]
        if not all(responses[1:-1]):
            return False
        given = [response for response in responses if response]
        return len(given) == 2 and given[0] != given[1]


class RepeatPrompt(Instruction, frozen=True, tag="combination:repeat_prompt"):
    """The answer must begin by repeating the request, ignoring case."""

    sentence: ClassVar = 'First repeat this request word for word without change: "{prompt_to_repeat}" Then answer it.'
    prompt_to_repeat: Text

    def follows(self, answer: str) -> bool:
        return answer.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class ResponseLanguage(Instruction, frozen=True, tag="language:response_language"):
    """The answer must be in a language, given by its ISO 639-1 code."""

    sentence: ClassVar = "Your entire response should be in {language}, no other language is allowed."
    language: Text

    def stated(self) -> str:
        """Return the sentence with the language's name."""
        return self.sentence.format(language=LANGUAGES[self.language].name)

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {self.language!r}")
        if is_slow_language(self.language) and importlib.util.find_spec(_LIBRARY) is None:
            raise ValueError(
                f"language {self.language!r} shares its script with others and can be detected only by {_LIBRARY}, "
                "which is not installed; pip install -e '.[languages]'"
            )

    def follows(self, answer: str) -> bool:
        scripts, shares = LANGUAGES[self.language].scripts, script_shares(answer)
        if not shares.get(scripts[0]) or sum(shares.get(script, 0.0) for script in scripts) < _LEAST_SHARE:
            return False
        if self.language == "zh" and shares.get("HIRAGANA", 0.0):
            return False
        rivals = _rivals(self.language)
        if len(rivals) == 1:
            return True
        return next(found for found, _ in _identifier().rank(answer) if found in rivals) == self.language


def _is_latin(text: str) -> bool:
    return script_shares(text).get("LATIN", 0.0) >= _MOSTLY


#: Minimum share of letters in the language's scripts; below 1, since names and terms may be foreign.
_LEAST_SHARE: Final = 0.7
_LIBRARY: Final = "py3langid"


class Language(NamedTuple):
    """A language's name and scripts. Every text in the language uses the first script; the others are optional."""

    name: str
    scripts: tuple[str, ...]


LANGUAGES: Final = {
    "ar": Language("Arabic", ("ARABIC",)), "bg": Language("Bulgarian", ("CYRILLIC",)),
    "bn": Language("Bengali", ("BENGALI",)), "cs": Language("Czech", ("LATIN",)),
    "da": Language("Danish", ("LATIN",)), "de": Language("German", ("LATIN",)),
    "el": Language("Greek", ("GREEK",)), "en": Language("English", ("LATIN",)),
    "es": Language("Spanish", ("LATIN",)), "fa": Language("Persian", ("ARABIC",)),
    "fi": Language("Finnish", ("LATIN",)), "fr": Language("French", ("LATIN",)),
    "gu": Language("Gujarati", ("GUJARATI",)), "he": Language("Hebrew", ("HEBREW",)),
    "hi": Language("Hindi", ("DEVANAGARI",)), "hu": Language("Hungarian", ("LATIN",)),
    "id": Language("Indonesian", ("LATIN",)), "it": Language("Italian", ("LATIN",)),
    "ja": Language("Japanese", ("HIRAGANA", "KATAKANA", "CJK")), "kn": Language("Kannada", ("KANNADA",)),
    "ko": Language("Korean", ("HANGUL",)), "ml": Language("Malayalam", ("MALAYALAM",)),
    "mr": Language("Marathi", ("DEVANAGARI",)), "ne": Language("Nepali", ("DEVANAGARI",)),
    "nl": Language("Dutch", ("LATIN",)), "no": Language("Norwegian", ("LATIN",)),
    "pa": Language("Punjabi", ("GURMUKHI",)), "pl": Language("Polish", ("LATIN",)),
    "pt": Language("Portuguese", ("LATIN",)), "ro": Language("Romanian", ("LATIN",)),
    "ru": Language("Russian", ("CYRILLIC",)), "sv": Language("Swedish", ("LATIN",)),
    "sw": Language("Swahili", ("LATIN",)), "ta": Language("Tamil", ("TAMIL",)),
    "te": Language("Telugu", ("TELUGU",)), "th": Language("Thai", ("THAI",)),
    "tr": Language("Turkish", ("LATIN",)), "uk": Language("Ukrainian", ("CYRILLIC",)),
    "ur": Language("Urdu", ("ARABIC",)), "vi": Language("Vietnamese", ("LATIN",)),
    "zh": Language("Chinese", ("CJK",)),
}  # fmt: skip


def is_slow_language(code: str) -> bool:
    """Return whether detecting this language needs py3langid, which takes seconds to load."""
    return len(_rivals(code)) > 1


def preload_languages() -> None:
    """Load py3langid now, if it is installed."""
    if importlib.util.find_spec(_LIBRARY) is not None:
        _identifier()


def _rivals(code: str) -> tuple[str, ...]:
    script = LANGUAGES[code].scripts[0]
    return tuple(other for other, language in LANGUAGES.items() if language.scripts[0] == script)


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
