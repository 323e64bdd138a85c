"""The language of README, docs, docstrings and comments stays within the counts of `voice`."""

from __future__ import annotations

from tests.architecture import voice


def test_docstrings_rarely_begin_with_a_clause_or_are_questions() -> None:
    assert len(voice.clauses()) <= 60
    assert len(voice.questions()) <= 5


def test_worn_words_are_rare() -> None:
    assert len(voice.worn_words()) <= 20


def test_sentences_of_the_readme_have_at_most_16_words_on_average() -> None:
    assert voice.words_per_sentence(voice.ROOT / "README.md") <= 16


def test_draw_is_repeatable_and_has_as_many_docstrings_comments_and_test_names() -> None:
    drawn = list(voice.draw(7, count=3))
    assert drawn == list(voice.draw(7, count=3)) != list(voice.draw(8, count=3))
    assert [text.split(",")[0] for text in drawn] == ["docstring"] * 3 + ["comment"] * 3 + ["test name"] * 3
