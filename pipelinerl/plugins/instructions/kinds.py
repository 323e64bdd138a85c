"""All kinds of instructions: on counts, on the form of an answer, and on its wording.

A keyword also counts inside a longer word, as in IFEval's code; a forbidden word counts only as a whole word. Both are
plain text, not regular expressions. All comparisons ignore case. JSON must be an object or an array, which is stricter
than IFEval's code, since that would reward empty answers.

IFEval's case instructions require English. Here they check for Latin letters, since no program can detect the language
of a few words in capitals. A language is detected by its script. Among languages that share the script, `py3langid`
decides (Barbaresi; the model of Lui and Baldwin 2012). This library is an extra, `pip install -e '.[languages]'`, and
takes seconds to load. Without it, languages that share a script are rejected. A text without letters matches no
language.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, field
from pydantic_core import from_json

from pipelinerl.plugins.instructions.instruction import (
    Count,
    Instruction,
    Kind,
    Relation,
    Text,
    Texts,
    hyphenated_words,
    num_sentences,
    script_shares,
    words,
)

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

# --- counts -----------------------------------------------------------------------------------------------------------

_DIVIDER = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
_ENDS_A_FIRST_WORD = re.compile(r"[.,?!'\"]")


class NumberOfWords(Kind, frozen=True, tag="length_constraints:number_words"):
    """The number of words must satisfy a bound."""

    sentence: ClassVar = "Answer with {relation} {num_words} words."
    num_words: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(len(words(answer)), self.num_words)


class NumberOfSentences(Kind, frozen=True, tag="length_constraints:number_sentences"):
    """The number of sentences must satisfy a bound."""

    sentence: ClassVar = "Your answer should contain {relation} {num_sentences} sentences."
    num_sentences: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(num_sentences(answer), self.num_sentences)


class NumberOfParagraphs(Kind, frozen=True, tag="length_constraints:number_paragraphs"):
    """Require a number of paragraphs, separated by `***` (or `* * *`).

    The text between two dividers must not be empty.
    """

    sentence: ClassVar = "Write exactly {num_paragraphs} paragraphs, separated by the markdown divider: ***"
    num_paragraphs: Count

    def follows(self, answer: str) -> bool:
        paragraphs = _DIVIDER.split(answer)
        if any(not paragraph.strip() for paragraph in paragraphs[1:-1]):
            return False
        return sum(bool(paragraph.strip()) for paragraph in paragraphs) == self.num_paragraphs


class NthParagraphFirstWord(Kind, frozen=True, tag="length_constraints:nth_paragraph_first_word"):
    """Require a number of paragraphs, and the n-th's first word."""

    sentence: ClassVar = (
        "Write exactly {num_paragraphs} paragraphs with a blank line between them. Paragraph "
        '{nth_paragraph} must begin with the word "{first_word}".'
    )
    num_paragraphs: Count
    nth_paragraph: Count
    first_word: Text

    def __post_init__(self) -> None:
        if self.nth_paragraph > self.num_paragraphs:
            raise ValueError(f"nth_paragraph must be at most num_paragraphs, {self.num_paragraphs}")

    def follows(self, answer: str) -> bool:
        paragraphs = [paragraph.strip() for paragraph in answer.split("\n\n") if paragraph.strip()]
        if len(paragraphs) != self.num_paragraphs:
            return False
        first = paragraphs[self.nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'\"")
        return _ENDS_A_FIRST_WORD.split(first, maxsplit=1)[0].lower() == self.first_word.strip().lower()


class Keywords(Kind, frozen=True, tag="keywords:existence"):
    """The answer must contain each of several keywords."""

    sentence: ClassVar = "Include the keywords {keywords}."
    keywords: Texts

    def follows(self, answer: str) -> bool:
        text = answer.lower()
        return all(keyword.strip().lower() in text for keyword in self.keywords)


class KeywordFrequency(Kind, frozen=True, tag="keywords:frequency"):
    """The number of occurrences of a keyword must satisfy a bound."""

    sentence: ClassVar = 'The word "{keyword}" should appear {relation} {frequency} times.'
    keyword: Text
    frequency: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(answer.lower().count(self.keyword.strip().lower()), self.frequency)


class ForbiddenWords(Kind, frozen=True, tag="keywords:forbidden_words"):
    """The answer must not contain any of several words."""

    sentence: ClassVar = "Do not use the words {forbidden_words}."
    forbidden_words: Texts

    def follows(self, answer: str) -> bool:
        return not any(
            re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", answer, re.IGNORECASE)
            for word in self.forbidden_words
        )


class LetterFrequency(Kind, frozen=True, tag="keywords:letter_frequency"):
    """The number of occurrences of a character must satisfy a bound."""

    sentence: ClassVar = 'The letter "{letter}" should appear {let_relation} {let_frequency} times.'
    letter: Annotated[str, Meta(min_length=1, max_length=1)]
    let_frequency: Count
    let_relation: Relation

    def follows(self, answer: str) -> bool:
        return self.let_relation.holds(answer.lower().count(self.letter.lower()), self.let_frequency)


class CapitalWordFrequency(Kind, frozen=True, tag="change_case:capital_word_frequency"):
    """The number of words in capital letters must satisfy a bound."""

    sentence: ClassVar = "Words in all capital letters should appear {capital_relation} {capital_frequency} times."
    capital_frequency: Count
    capital_relation: Relation

    def follows(self, answer: str) -> bool:
        capital = sum(word.isupper() for word in hyphenated_words(answer))
        return self.capital_relation.holds(capital, self.capital_frequency)


# --- form -------------------------------------------------------------------------------------------------------------

_PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]+\]")
_HIGHLIGHT: Final = re.compile(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*")
_FENCE: Final = re.compile(r"```(?:json)?", re.IGNORECASE)
_POSTSCRIPTS: Final = {
    "P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE),
    "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE),
}
#: The options of IFEval's `detectable_format:constrained_response`.
CONSTRAINED_RESPONSES: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class NumberOfBullets(Kind, frozen=True, tag="detectable_format:number_bullet_lists"):
    """Require an exact number of lines that begin with `*` or `-`."""

    sentence: ClassVar = (
        "Your answer must contain exactly {num_bullets} bullet points. Use the markdown bullet points such "
        "as:\n* This is a point."
    )
    num_bullets: Count

    def follows(self, answer: str) -> bool:
        lines = (line.strip() for line in answer.split("\n"))
        points = sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines)
        return points == self.num_bullets


class MultipleSections(Kind, frozen=True, tag="detectable_format:multiple_sections"):
    """Require a minimum number of headings: a word and a number."""

    sentence: ClassVar = (
        "Your answer must have {num_sections} sections. Mark the beginning of each section with "
        "{section_spliter} X, such as:\n{section_spliter} 1"
    )
    section_spliter: Text
    num_sections: Count

    def follows(self, answer: str) -> bool:
        return len(re.findall(re.escape(self.section_spliter.strip()) + r"\s?\d", answer)) >= self.num_sections


class HighlightedSections(Kind, frozen=True, tag="detectable_format:number_highlighted_sections"):
    """Require a minimum number of texts between asterisks."""

    sentence: ClassVar = (
        "Highlight at least {num_highlights} sections in your answer with markdown, i.e. *highlighted section*."
    )
    num_highlights: Count

    def follows(self, answer: str) -> bool:
        return sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(answer)) >= self.num_highlights


class Title(Kind, frozen=True, tag="detectable_format:title"):
    """Require a non-empty title in double angular brackets, on one line."""

    sentence: ClassVar = (
        "Your answer must contain a title, wrapped in double angular brackets, such as <<poem of joy>>."
    )

    def follows(self, answer: str) -> bool:
        for line in answer.split("\n"):
            begin, end = line.find("<<"), line.rfind(">>")
            if 0 <= begin < end and line[begin:end].strip("<> \t\r"):
                return True
        return False


class JsonFormat(Kind, frozen=True, tag="detectable_format:json_format"):
    """The whole answer must be a JSON object or array, optionally in a code fence."""

    sentence: ClassVar = "Your entire output should be wrapped in JSON format. You can use markdown ticks such as ```."

    def follows(self, answer: str) -> bool:
        text = answer.strip()
        if opening := _FENCE.match(text):
            text = text[opening.end() :].removesuffix("```")
        try:
            return isinstance(from_json(text.encode("utf-8", "replace"), allow_inf_nan=False), dict | list)
        except ValueError:
            return False


class ConstrainedResponse(Kind, frozen=True, tag="detectable_format:constrained_response"):
    """Require one of several answers, by default IFEval's."""

    sentence: ClassVar = "Answer with one of the following options: {options}"
    options: Texts = field(default_factory=lambda: list(CONSTRAINED_RESPONSES))

    def follows(self, answer: str) -> bool:
        return any(option in answer for option in self.options)


class Placeholders(Kind, frozen=True, tag="detectable_content:number_placeholders"):
    """Require a minimum number of non-empty texts in square brackets."""

    sentence: ClassVar = (
        "The answer must contain at least {num_placeholders} placeholders represented by square brackets, "
        "such as [address]."
    )
    num_placeholders: Count

    def follows(self, answer: str) -> bool:
        return len(_PLACEHOLDER.findall(answer)) >= self.num_placeholders


class Postscript(Kind, frozen=True, tag="detectable_content:postscript"):
    """Require a postscript with a given marker, such as `P.S.`."""

    sentence: ClassVar = "At the end of your answer, add a postscript starting with {postscript_marker}"
    postscript_marker: Text

    def follows(self, answer: str) -> bool:
        marker = self.postscript_marker.strip()
        pattern = _POSTSCRIPTS.get(marker) or re.compile(re.escape(marker), re.IGNORECASE)
        return pattern.search(answer) is not None


# --- wording ----------------------------------------------------------------------------------------------------------

#: Minimum share of Latin letters in a text that may be English.
_MOSTLY: Final = 0.9


class AllCapitals(Kind, frozen=True, tag="change_case:english_capital"):
    """The answer must be in English, in capital letters only."""

    sentence: ClassVar = "Your entire response should be in English, and in all capital letters."

    def follows(self, answer: str) -> bool:
        return answer.isupper() and _is_latin(answer)


class AllLowercase(Kind, frozen=True, tag="change_case:english_lowercase"):
    """The answer must be in English, in lowercase letters only."""

    sentence: ClassVar = (
        "Your entire response should be in English, and in all lowercase letters. No capital letters are allowed."
    )

    def follows(self, answer: str) -> bool:
        return answer.islower() and _is_latin(answer)


class NoComma(Kind, frozen=True, tag="punctuation:no_comma"):
    """The answer must not contain commas."""

    sentence: ClassVar = "In your entire response, refrain from the use of any commas."

    def follows(self, answer: str) -> bool:
        return "," not in answer


class EndPhrase(Kind, frozen=True, tag="startend:end_checker"):
    """The answer must end with a phrase, ignoring case and quotation marks."""

    sentence: ClassVar = 'Finish your response with this exact phrase: "{end_phrase}" No other words should follow it.'
    end_phrase: Text

    def follows(self, answer: str) -> bool:
        return answer.strip().strip('"').lower().endswith(self.end_phrase.strip().strip('"').lower())


class QuotationMarks(Kind, frozen=True, tag="startend:quotation"):
    """The answer must be a non-empty text in double quotation marks."""

    sentence: ClassVar = "Wrap your entire response with double quotation marks."

    def follows(self, answer: str) -> bool:
        text = answer.strip()
        return len(text) > 2 and text[0] == text[-1] == '"'


class TwoResponses(Kind, frozen=True, tag="combination:two_responses"):
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


class RepeatPrompt(Kind, frozen=True, tag="combination:repeat_prompt"):
    """The answer must begin by repeating the request, ignoring case."""

    sentence: ClassVar = 'First repeat this request word for word without change: "{prompt_to_repeat}" Then answer it.'
    prompt_to_repeat: Text

    def follows(self, answer: str) -> bool:
        return answer.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class ResponseLanguage(Kind, frozen=True, tag="language:response_language"):
    """The answer must be in a language, given by its ISO 639-1 code."""

    sentence: ClassVar = "Your entire response should be in {language}, no other language is allowed."
    language: Text

    def stated(self) -> str:
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


KINDS: Final[tuple[type[Instruction], ...]] = (
    NumberOfWords, NumberOfSentences, NumberOfParagraphs, NthParagraphFirstWord, Keywords, KeywordFrequency,
    ForbiddenWords, LetterFrequency, CapitalWordFrequency, NumberOfBullets, MultipleSections, HighlightedSections,
    Title, JsonFormat, ConstrainedResponse, Placeholders, Postscript, AllCapitals, AllLowercase, NoComma, EndPhrase,
    QuotationMarks, TwoResponses, RepeatPrompt, ResponseLanguage,
)  # fmt: skip
