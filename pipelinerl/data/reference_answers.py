"""Reference answers built from instructions: simple sentences about a topic, in the form that the instructions require.

A returned answer was checked to follow every instruction strictly; if none was found, the result is None. The text is
plain English without commas, good enough to show a model how instructions are followed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from pipelinerl.instructions import counts, formats, wording
from pipelinerl.instructions.catalogue import Asked
from pipelinerl.instructions.instruction import Relation
from pipelinerl.instructions.scoring import followed
from pipelinerl.instructions.text import words

_SENTENCES: Final = (
    "{} can change how people see a day.", "Many people think of {} when they are alone.",
    "There is a lot to learn about {}.", "A friend told me about {} last summer.",
    "Some of us like {} more than anything else.", "We talked about {} until it was late.",
    "The story of {} is old and simple.", "Our family has its own memory of {}.",
    "Children often ask about {}.", "It takes time to understand {}.", "{} is best when shared with others.",
    "One small detail about {} stays in mind.", "The first hour with {} is the best.",
    "Here is a plain idea about {}.", "Each part of {} has a place.",
)  # fmt: skip
_PLACES: Final = ("name", "place", "date", "address", "number", "title", "city", "friend", "time", "color")
#: Words that contain rare letters.
_HOLDERS: Final = {
    "j": "joy",
    "k": "kind",
    "q": "quiet",
    "v": "river",
    "w": "water",
    "x": "box",
    "y": "day",
    "z": "zoo",
}
DEFAULT_SENTENCES: Final = 3
#: Numbers of sentences tried after the requested number: some instructions are easier to follow in a short text.
_OTHER_LENGTHS: Final = (1, 2)


def answer_following(
    instructions: Sequence[Asked], topic: str, noise: np.random.Generator, *, sentences: int = DEFAULT_SENTENCES
) -> str | None:
    """Return an answer about the topic that follows all instructions, or None if none was found.

    The answer has `sentences` sentences unless an instruction asks for another number.
    """
    by_kind = {type(each.instruction): each.instruction for each in instructions}
    order = [_SENTENCES[int(place)].format(topic) for place in noise.permutation(len(_SENTENCES))]
    for length in (sentences, *_OTHER_LENGTHS):
        answer = _surrounded(_formed(by_kind, order, length), by_kind, topic)
        if all(followed(instructions, answer)):
            return answer
    return None


def _formed(by_kind: dict[type, Any], order: Sequence[str], length: int) -> str:
    """Arrange the sentences in the paragraphs, points or sections that the instructions require."""
    if formats.ConstrainedResponse in by_kind:
        return formats.CONSTRAINED_RESPONSES[0]
    layout = next((each for kind, each in by_kind.items() if kind in _PARTS), None)
    count = length if layout is None else _PARTS[type(layout)](layout)
    wanted = by_kind.get(counts.NumberOfSentences)
    if wanted is not None and wanted.relation is Relation.AT_LEAST:
        count = max(count, wanted.num_sentences)
    sentences = _lengthened([_sentence(order, place) for place in range(count)], by_kind, order)
    match layout:
        case counts.NumberOfParagraphs():
            return "\n***\n".join(_shared_out(sentences, layout.num_paragraphs))
        case counts.NthParagraphFirstWord():
            parts = _shared_out(sentences, layout.num_paragraphs)
            nth = layout.nth_paragraph - 1
            parts[nth] = f"{layout.first_word.capitalize()} and more: {parts[nth]}"
            return "\n\n".join(parts)
        case formats.NumberOfBullets():
            return "\n".join(f"* {part}" for part in _shared_out(sentences, layout.num_bullets))
        case formats.MultipleSections():
            parts = _shared_out(sentences, layout.num_sections)
            return "\n".join(f"{layout.section_spliter} {place}\n{part}" for place, part in enumerate(parts, 1))
        case wording.TwoResponses():
            return "\n******\n".join(_shared_out(sentences, 2))
    return " ".join(sentences)


#: Functions that return the number of parts that a layout requires.
_PARTS: Final[dict[type, Any]] = {
    counts.NumberOfParagraphs: lambda layout: layout.num_paragraphs,
    counts.NthParagraphFirstWord: lambda layout: layout.num_paragraphs,
    formats.NumberOfBullets: lambda layout: layout.num_bullets,
    formats.MultipleSections: lambda layout: layout.num_sections,
    wording.TwoResponses: lambda layout: 2,
}


def _sentence(order: Sequence[str], place: int) -> str:
    return _capitalized(order[place % len(order)])


def _lengthened(sentences: list[str], by_kind: dict[type, Any], order: Sequence[str]) -> list[str]:
    """Add the required words to the last sentence as clauses, so that the number of sentences stays."""
    clauses = list(_clauses(by_kind, " ".join(sentences)))
    wanted = by_kind.get(counts.NumberOfWords)
    if wanted is not None and wanted.relation is Relation.AT_LEAST:
        have, place = len(words(" ".join(sentences))), len(sentences)
        while have < wanted.num_words:
            clause = order[place % len(order)].rstrip(".")
            clauses.append(clause[0].lower() + clause[1:])
            have, place = have + len(words(clause)), place + 1
    if not clauses:
        return sentences
    return [*sentences[:-1], " and ".join([sentences[-1].rstrip("."), *clauses]) + "."]


def _clauses(by_kind: dict[type, Any], text: str) -> list[str]:
    clauses: list[str] = []
    for kind, each in by_kind.items():
        if kind is counts.Keywords:
            clauses.append("we think of " + " and ".join(each.keywords))
        elif kind is counts.KeywordFrequency and each.relation is Relation.AT_LEAST:
            clauses.append("we say " + " and ".join([each.keyword] * each.frequency))
        elif kind is counts.LetterFrequency and each.let_relation is Relation.AT_LEAST:
            lacking = max(0, each.let_frequency - text.lower().count(each.letter.lower()))
            holder = _HOLDERS.get(each.letter.lower(), next((w for w in _PLACES if each.letter in w), each.letter))
            clauses += [" and ".join([holder] * lacking)] if lacking else []
        elif kind is counts.CapitalWordFrequency and each.capital_relation is Relation.AT_LEAST:
            clauses.append("we say " + " and ".join(["YES"] * each.capital_frequency))
        elif kind is formats.Placeholders:
            places = [_PLACES[place % len(_PLACES)] for place in range(each.num_placeholders)]
            clauses.append("we ask for " + " and ".join(f"[{place}]" for place in places))
        elif kind is formats.HighlightedSections:
            clauses.append("we mark " + " and ".join(["*this*"] * each.num_highlights))
    return clauses


def _shared_out(sentences: Sequence[str], parts: int) -> list[str]:
    """Split the sentences into `parts` parts of nearly equal size; the first parts may have a sentence more."""
    size, more = divmod(len(sentences), parts)
    ends = [place * size + min(place, more) for place in range(parts + 1)]
    return [" ".join(sentences[begin:end]) for begin, end in pairwise(ends)]


def _surrounded(text: str, by_kind: dict[type, Any], topic: str) -> str:
    """Add title, postscript, end phrase and so on, and set the required case."""
    if formats.Title in by_kind:
        text = f"<<About {topic}>>\n{text}"
    if formats.Postscript in by_kind:
        text = f"{text}\n{by_kind[formats.Postscript].postscript_marker} Take care."
    if wording.EndPhrase in by_kind:
        text = f"{text} {by_kind[wording.EndPhrase].end_phrase}"
    if formats.JsonFormat in by_kind:
        text = json.dumps({"answer": text})
    if wording.RepeatPrompt in by_kind:
        text = f"{by_kind[wording.RepeatPrompt].prompt_to_repeat}\n{text}"
    if wording.AllCapitals in by_kind:
        text = text.upper()
    if wording.AllLowercase in by_kind:
        text = text.lower()
    return f'"{text}"' if wording.QuotationMarks in by_kind else text


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]
