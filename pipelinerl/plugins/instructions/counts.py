"""Instructions that count: words, sentences, paragraphs, keywords, letters, words in capitals.

A keyword also counts inside a longer word, as in IFEval's code; a forbidden word counts only as a whole word. Both are
plain text, not regular expressions. All comparisons ignore case.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from msgspec import Meta

from pipelinerl.plugins.instructions.instruction import (
    Count,
    Instruction,
    Relation,
    Text,
    Texts,
    hyphenated_words,
    num_sentences,
    words,
)

_DIVIDER = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
_ENDS_A_FIRST_WORD = re.compile(r"[.,?!'\"]")


class NumberOfWords(Instruction, frozen=True, tag="length_constraints:number_words"):
    """The number of words must satisfy a bound."""

    sentence: ClassVar = "Answer with {relation} {num_words} words."
    num_words: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(len(words(answer)), self.num_words)


class NumberOfSentences(Instruction, frozen=True, tag="length_constraints:number_sentences"):
    """The number of sentences must satisfy a bound."""

    sentence: ClassVar = "Your answer should contain {relation} {num_sentences} sentences."
    num_sentences: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(num_sentences(answer), self.num_sentences)


class NumberOfParagraphs(Instruction, frozen=True, tag="length_constraints:number_paragraphs"):
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


class NthParagraphFirstWord(Instruction, frozen=True, tag="length_constraints:nth_paragraph_first_word"):
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


class Keywords(Instruction, frozen=True, tag="keywords:existence"):
    """The answer must contain each of several keywords."""

    sentence: ClassVar = "Include the keywords {keywords}."
    keywords: Texts

    def follows(self, answer: str) -> bool:
        text = answer.lower()
        return all(keyword.strip().lower() in text for keyword in self.keywords)


class KeywordFrequency(Instruction, frozen=True, tag="keywords:frequency"):
    """The number of occurrences of a keyword must satisfy a bound."""

    sentence: ClassVar = 'The word "{keyword}" should appear {relation} {frequency} times.'
    keyword: Text
    frequency: Count
    relation: Relation

    def follows(self, answer: str) -> bool:
        return self.relation.holds(answer.lower().count(self.keyword.strip().lower()), self.frequency)


class ForbiddenWords(Instruction, frozen=True, tag="keywords:forbidden_words"):
    """The answer must not contain any of several words."""

    sentence: ClassVar = "Do not use the words {forbidden_words}."
    forbidden_words: Texts

    def follows(self, answer: str) -> bool:
        return not any(
            re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", answer, re.IGNORECASE)
            for word in self.forbidden_words
        )


class LetterFrequency(Instruction, frozen=True, tag="keywords:letter_frequency"):
    """The number of occurrences of a character must satisfy a bound."""

    sentence: ClassVar = 'The letter "{letter}" should appear {let_relation} {let_frequency} times.'
    letter: Annotated[str, Meta(min_length=1, max_length=1)]
    let_frequency: Count
    let_relation: Relation

    def follows(self, answer: str) -> bool:
        return self.let_relation.holds(answer.lower().count(self.letter.lower()), self.let_frequency)


class CapitalWordFrequency(Instruction, frozen=True, tag="change_case:capital_word_frequency"):
    """The number of words in capital letters must satisfy a bound."""

    sentence: ClassVar = "Words in all capital letters should appear {capital_relation} {capital_frequency} times."
    capital_frequency: Count
    capital_relation: Relation

    def follows(self, answer: str) -> bool:
        capital = sum(word.isupper() for word in hyphenated_words(answer))
        return self.capital_relation.holds(capital, self.capital_frequency)
