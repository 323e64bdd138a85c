"""Instructions that count: words, sentences, paragraphs, keywords, letters, words in capitals.

A keyword also counts inside a longer word, as in IFEval's code; a forbidden word counts only as a whole word. Both are
plain text, not regular expressions.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from pipelinerl.instructions.instruction import Count, Relation, Text, Texts, hyphenated_words, num_sentences, words

_DIVIDER = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
_ENDS_A_FIRST_WORD = re.compile(r"[.,?!'\"]")


class NumberOfWords(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`length_constraints:number_words`: the number of words must satisfy a bound."""

    num_words: Count
    relation: Relation

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Answer with {self.relation} {self.num_words} words."

    def follows(self, answer: str) -> bool:
        """Return whether the number of words satisfies the bound."""
        return self.relation.holds(len(words(answer)), self.num_words)


class NumberOfSentences(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`length_constraints:number_sentences`: the number of sentences must satisfy a bound."""

    num_sentences: Count
    relation: Relation

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Your answer should contain {self.relation} {self.num_sentences} sentences."

    def follows(self, answer: str) -> bool:
        """Return whether the number of sentences satisfies the bound."""
        return self.relation.holds(num_sentences(answer), self.num_sentences)


class NumberOfParagraphs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`length_constraints:number_paragraphs`: require a number of paragraphs, separated by `***` (or `* * *`)."""

    num_paragraphs: Count

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Write exactly {self.num_paragraphs} paragraphs, separated by the markdown divider: ***"

    def follows(self, answer: str) -> bool:
        """Return whether the answer has the required number of paragraphs, and none between two dividers is empty."""
        paragraphs = _DIVIDER.split(answer)
        if any(not paragraph.strip() for paragraph in paragraphs[1:-1]):
            return False
        return sum(bool(paragraph.strip()) for paragraph in paragraphs) == self.num_paragraphs


class NthParagraphFirstWord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`length_constraints:nth_paragraph_first_word`: require a number of paragraphs, and the n-th's first word."""

    num_paragraphs: Count
    nth_paragraph: Count
    first_word: Text

    def __post_init__(self) -> None:
        if self.nth_paragraph > self.num_paragraphs:
            raise ValueError(f"nth_paragraph must be at most num_paragraphs, {self.num_paragraphs}")

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return (
            f"Write exactly {self.num_paragraphs} paragraphs with a blank line between them. Paragraph "
            f'{self.nth_paragraph} must begin with the word "{self.first_word}".'
        )

    def follows(self, answer: str) -> bool:
        """Return whether the number of paragraphs is right and the n-th begins with the word, ignoring case."""
        paragraphs = [paragraph.strip() for paragraph in answer.split("\n\n") if paragraph.strip()]
        if len(paragraphs) != self.num_paragraphs:
            return False
        first = paragraphs[self.nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'\"")
        return _ENDS_A_FIRST_WORD.split(first, maxsplit=1)[0].lower() == self.first_word.strip().lower()


class Keywords(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`keywords:existence`: the answer must contain each of several keywords."""

    keywords: Texts

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Include the keywords {_listed(self.keywords)}."

    def follows(self, answer: str) -> bool:
        """Return whether each keyword occurs, ignoring case."""
        text = answer.lower()
        return all(keyword.strip().lower() in text for keyword in self.keywords)


class KeywordFrequency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`keywords:frequency`: the number of occurrences of a keyword must satisfy a bound."""

    keyword: Text
    frequency: Count
    relation: Relation

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f'The word "{self.keyword}" should appear {self.relation} {self.frequency} times.'

    def follows(self, answer: str) -> bool:
        """Return whether the number of the keyword's occurrences, ignoring case, satisfies the bound."""
        return self.relation.holds(answer.lower().count(self.keyword.strip().lower()), self.frequency)


class ForbiddenWords(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`keywords:forbidden_words`: the answer must not contain any of several words."""

    forbidden_words: Texts

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Do not use the words {_listed(self.forbidden_words)}."

    def follows(self, answer: str) -> bool:
        """Return whether no forbidden word occurs as a whole word, ignoring case."""
        return not any(
            re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", answer, re.IGNORECASE)
            for word in self.forbidden_words
        )


class LetterFrequency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`keywords:letter_frequency`: the number of occurrences of a character must satisfy a bound."""

    letter: Annotated[str, Meta(min_length=1, max_length=1)]
    let_frequency: Count
    let_relation: Relation

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f'The letter "{self.letter}" should appear {self.let_relation} {self.let_frequency} times.'

    def follows(self, answer: str) -> bool:
        """Return whether the number of the letter's occurrences, ignoring case, satisfies the bound."""
        return self.let_relation.holds(answer.lower().count(self.letter.lower()), self.let_frequency)


class CapitalWordFrequency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`change_case:capital_word_frequency`: the number of words in capital letters must satisfy a bound."""

    capital_frequency: Count
    capital_relation: Relation

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"Words in all capital letters should appear {self.capital_relation} {self.capital_frequency} times."

    def follows(self, answer: str) -> bool:
        """Return whether the number of words in capital letters satisfies the bound."""
        capital = sum(word.isupper() for word in hyphenated_words(answer))
        return self.capital_relation.holds(capital, self.capital_frequency)


def _listed(texts: list[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)
