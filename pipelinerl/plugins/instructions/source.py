"""The source `instructions`: requests to write about a topic, with instructions that can be checked.

    parameters = { min_instructions = 1, max_instructions = 3, level = 1, sentences = 3,
                   kinds = ["punctuation:no_comma", …], topics = ["the sea", …] }

A problem's ground truth is an answer that follows all of its instructions, which are therefore compatible. Its metadata
lists them for the verifier `instruction_following`, and a tag gives their number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from pipelinerl import rng
from pipelinerl.data.generated import GeneratedSource, parameters_of
from pipelinerl.data.source import Draft, SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions import kinds
from pipelinerl.plugins.instructions.catalogue import followed, make_instruction
from pipelinerl.plugins.instructions.instruction import Instruction, Relation, stated, words
from pipelinerl.types import Message

#: Number of instruction sets tried for a problem; some sets are contradictory.
_TRIES: Final = 200


TOPICS: Final = (
    "the sea", "a small village", "bees", "rain", "old maps", "the moon", "bread", "a long journey", "trains",
    "the winter", "music", "a garden", "friendship", "the desert", "bridges", "birds", "a market", "tea", "forests",
    "sleep", "a lost key", "mountains", "city life", "the night sky", "school", "a river", "paper", "horses",
    "the kitchen", "a good book", "clocks", "islands", "running", "the wind", "painting", "a lighthouse",
)  # fmt: skip
_REQUESTS: Final = (
    "Write a short text about {}.", "Tell me something about {}.", "Explain to a child what is special about {}.",
    "Write a note to a friend about {}.", "Describe {}.", "Write a product review that has to do with {}.",
    "Give advice on {}.", "Write a little story about {}.", "Write a blog post about {}.", "Write a poem about {}.",
    "Write an email to my boss about {}.", "What should I know about {}?",
)  # fmt: skip
_WORDS: Final = (
    "lantern", "copper", "velvet", "thunder", "harvest", "puzzle", "signal", "marble", "ribbon", "compass", "orchard",
    "whisper", "anchor", "feather", "candle", "meadow", "pepper", "shadow", "silver", "basket",
)  # fmt: skip
_ENDINGS: Final = (
    "Is there anything else I can help with?", "That is all there is to say.", "Let me know what you think.",
    "See you soon.", "Peace!",
)  # fmt: skip

#: Function that draws an instruction's parameters, given a random generator, the level and the request.
_Draw = Callable[[np.random.Generator, int, str], dict[str, Any]]


def _up_to(noise: np.random.Generator, low: int, high: int) -> int:
    return int(noise.integers(low, high + 1))


def _one(noise: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(noise.integers(len(options)))]


def _some(noise: np.random.Generator, options: Sequence[str], most: int) -> list[str]:
    count = min(_up_to(noise, 1, most), len(options))
    return [options[int(place)] for place in noise.permutation(len(options))[:count]]


def _words(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    if noise.integers(2):
        return {"relation": "at least", "num_words": 10 * level + _up_to(noise, 0, 20 * level)}
    return {"relation": "less than", "num_words": 20 + _up_to(noise, 0, 20) * max(1, 4 - level)}


def _sentences(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    if noise.integers(2):
        return {"relation": "at least", "num_sentences": level + _up_to(noise, 0, level)}
    return {"relation": "less than", "num_sentences": _up_to(noise, 2, 6)}


def _letter(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    if noise.integers(2):
        return {
            "letter": _one(noise, "etaoinsrh"),
            "let_frequency": _up_to(noise, 5, 10 * level),
            "let_relation": "at least",
        }
    return {"letter": _one(noise, "jkqvwxyz"), "let_frequency": _up_to(noise, 2, 5), "let_relation": "less than"}


def _capitals(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    relation = _one(noise, ("at least", "less than"))
    return {"capital_relation": relation, "capital_frequency": _up_to(noise, 2, 2 + level)}


def _nth_paragraph(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    paragraphs = _up_to(noise, 2, 2 + level)
    nth = _up_to(noise, 1, paragraphs)
    return {"num_paragraphs": paragraphs, "nth_paragraph": nth, "first_word": _one(noise, _WORDS)}


#: Functions that draw the parameters of each kind of instruction. `language:response_language` is left out, since
#: reference answers are in English.
_DRAWS: Final[Mapping[str, _Draw]] = {
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda noise, level, request: {},
    "change_case:english_lowercase": lambda noise, level, request: {},
    "combination:repeat_prompt": lambda noise, level, request: {"prompt_to_repeat": request},
    "combination:two_responses": lambda noise, level, request: {},
    "detectable_content:number_placeholders": lambda noise, level, _: {"num_placeholders": _up_to(noise, 1, level + 1)},
    "detectable_content:postscript": lambda noise, level, _: {"postscript_marker": _one(noise, ("P.S.", "P.P.S"))},
    "detectable_format:constrained_response": lambda noise, level, request: {},
    "detectable_format:json_format": lambda noise, level, request: {},
    "detectable_format:multiple_sections": lambda noise, level, _: {
        "section_spliter": _one(noise, ("SECTION", "Section", "PARAGRAPH", "Day")),
        "num_sections": _up_to(noise, 2, 2 + level),
    },
    "detectable_format:number_bullet_lists": lambda noise, level, _: {"num_bullets": _up_to(noise, 1, 2 + level)},
    "detectable_format:number_highlighted_sections": lambda noise, level, _: {
        "num_highlights": _up_to(noise, 1, 1 + level)
    },
    "detectable_format:title": lambda noise, level, request: {},
    "keywords:existence": lambda noise, level, _: {"keywords": _some(noise, _WORDS, level + 1)},
    "keywords:forbidden_words": lambda noise, level, _: {
        "forbidden_words": _some(
            noise, ("very", "good", "nice", "great", "because", "but", "always", "never"), level + 1
        )
    },
    "keywords:frequency": lambda noise, level, _: {
        "keyword": _one(noise, _WORDS),
        "frequency": _up_to(noise, 1, level + 1),
        "relation": "at least",
    },
    "keywords:letter_frequency": _letter,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "length_constraints:number_paragraphs": lambda noise, level, _: {"num_paragraphs": _up_to(noise, 2, 2 + level)},
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": lambda noise, level, request: {},
    "startend:end_checker": lambda noise, level, _: {"end_phrase": _one(noise, _ENDINGS)},
    "startend:quotation": lambda noise, level, request: {},
}

#: Sets of kinds that conflict in the answer's layout, case, beginning or end. A problem has at most one kind per set.
_ONE_OF: Final = (
    frozenset(
        {
            "combination:two_responses", "detectable_format:constrained_response", "detectable_format:json_format",
            "detectable_format:multiple_sections", "detectable_format:number_bullet_lists",
            "length_constraints:nth_paragraph_first_word", "length_constraints:number_paragraphs",
        }
    ),
    frozenset({"change_case:capital_word_frequency", "change_case:english_capital", "change_case:english_lowercase"}),
    frozenset({"startend:quotation", "detectable_format:json_format", "combination:repeat_prompt"}),
    frozenset({"detectable_format:json_format", "detectable_content:postscript", "startend:end_checker"}),
)  # fmt: skip


class _Parameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_instructions: Annotated[int, Meta(ge=1, le=8)] = 1
    max_instructions: Annotated[int, Meta(ge=1, le=8)] = 3
    level: Annotated[int, Meta(ge=1, le=5)] = 1
    """Scale of the instructions' numbers: level 5 requires about five times as many words or points as level 1."""
    sentences: Annotated[int, Meta(ge=1, le=15)] = 3
    """Number of sentences in a reference answer whose instructions do not set one."""
    kinds: list[str] = field(default_factory=lambda: list(_DRAWS))
    topics: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] = field(
        default_factory=lambda: list(TOPICS)
    )

    def __post_init__(self) -> None:
        if self.min_instructions > self.max_instructions:
            raise ValueError("min_instructions must be at most max_instructions")
        if not self.kinds or (unknown := [kind for kind in self.kinds if kind not in _DRAWS]):
            raise ValueError(f"kinds must be some of {', '.join(_DRAWS)}; got {', '.join(unknown) or 'none'}")


def open_instructions(request: SourceRequest) -> GeneratedSource:
    """Open the source `instructions`. Raises `RecipeError` for invalid parameters."""
    parameters = parameters_of(request, _Parameters, source="instructions")
    return GeneratedSource(lambda key: _drawn(parameters, key, where=request.where), request)


def _drawn(parameters: _Parameters, key: int, *, where: str) -> Draft:
    for attempt in range(_TRIES):
        noise = rng.generator(key, "instructions", attempt)
        topic = _one(noise, parameters.topics)
        request = _one(noise, _REQUESTS).format(topic)
        wanted = _up_to(noise, parameters.min_instructions, parameters.max_instructions)
        chosen: list[str] = []
        for place in noise.permutation(len(parameters.kinds)):
            kind = parameters.kinds[int(place)]
            excluded = any(kind in group and not group.isdisjoint(chosen) for group in _ONE_OF)
            if len(chosen) < wanted and kind not in chosen and not excluded:
                chosen.append(kind)
        instructions = [make_instruction(kind, _DRAWS[kind](noise, parameters.level, request)) for kind in chosen]
        answer = None
        if len(instructions) >= parameters.min_instructions:
            answer = _answer_following(instructions, topic, noise, parameters.sentences)
        if answer is not None:
            text = "\n".join([request, *map(stated, instructions)])
            return Draft(
                messages=(Message("user", text),),
                ground_truth=answer,
                metadata={"instructions": [msgspec.to_builtins(each) for each in instructions]},
                tags=(f"instructions={len(instructions)}",),
            )
    raise RecipeError(
        f"{where}.parameters: {_TRIES} tries found no {parameters.min_instructions} of these kinds that can be "
        "combined; lower min_instructions, or choose other kinds"
    )


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
#: For each rare letter, a word that contains it and can be added to an answer.
_HOLDERS: Final = {
    "j": "joy", "k": "kind", "q": "quiet", "v": "river", "w": "water", "x": "box", "y": "day", "z": "zoo",
}  # fmt: skip
#: Numbers of sentences that are tried if an answer of the requested length does not follow all instructions.
_OTHER_LENGTHS: Final = (1, 2)


def _answer_following(
    instructions: Sequence[Instruction], topic: str, noise: np.random.Generator, sentences: int
) -> str | None:
    """Return an answer about the topic that follows all instructions, or None if none was found.

    The answer has `sentences` sentences unless an instruction requires another number.
    """
    by_kind = {type(each): each for each in instructions}
    order = [_SENTENCES[int(place)].format(topic) for place in noise.permutation(len(_SENTENCES))]
    for length in (sentences, *_OTHER_LENGTHS):
        answer = _surrounded(_formed(by_kind, order, length), by_kind, topic)
        if all(followed(instructions, answer)):
            return answer
    return None


def _formed(by_kind: dict[type, Any], order: Sequence[str], length: int) -> str:
    if kinds.ConstrainedResponse in by_kind:
        return kinds.CONSTRAINED_RESPONSES[0]
    layout = next((each for kind, each in by_kind.items() if kind in _PARTS), None)
    count = length if layout is None else _PARTS[type(layout)](layout)
    wanted = by_kind.get(kinds.NumberOfSentences)
    if wanted is not None and wanted.relation is Relation.AT_LEAST:
        count = max(count, wanted.num_sentences)
    sentences = [text[0].upper() + text[1:] for text in islice(cycle(order), count)]
    sentences = _lengthened(sentences, by_kind, order)
    match layout:
        case kinds.NumberOfParagraphs():
            return "\n***\n".join(_shared_out(sentences, layout.num_paragraphs))
        case kinds.NthParagraphFirstWord():
            parts = _shared_out(sentences, layout.num_paragraphs)
            nth = layout.nth_paragraph - 1
            parts[nth] = f"{layout.first_word.capitalize()} and more: {parts[nth]}"
            return "\n\n".join(parts)
        case kinds.NumberOfBullets():
            return "\n".join(f"* {part}" for part in _shared_out(sentences, layout.num_bullets))
        case kinds.MultipleSections():
            parts = _shared_out(sentences, layout.num_sections)
            return "\n".join(f"{layout.section_spliter} {place}\n{part}" for place, part in enumerate(parts, 1))
        case kinds.TwoResponses():
            return "\n******\n".join(_shared_out(sentences, 2))
    return " ".join(sentences)


#: For each instruction on the layout, a function that returns the number of parts that it requires.
_PARTS: Final[dict[type, Any]] = {
    kinds.NumberOfParagraphs: lambda layout: layout.num_paragraphs,
    kinds.NthParagraphFirstWord: lambda layout: layout.num_paragraphs,
    kinds.NumberOfBullets: lambda layout: layout.num_bullets,
    kinds.MultipleSections: lambda layout: layout.num_sections,
    kinds.TwoResponses: lambda layout: 2,
}


def _lengthened(sentences: list[str], by_kind: dict[type, Any], order: Sequence[str]) -> list[str]:
    """Append the required words to the last sentence as clauses, which keeps the number of sentences."""
    clauses = _clauses(by_kind, " ".join(sentences))
    wanted = by_kind.get(kinds.NumberOfWords)
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
        if kind is kinds.Keywords:
            clauses.append("we think of " + " and ".join(each.keywords))
        elif kind is kinds.KeywordFrequency and each.relation is Relation.AT_LEAST:
            clauses.append("we say " + " and ".join([each.keyword] * each.frequency))
        elif kind is kinds.LetterFrequency and each.let_relation is Relation.AT_LEAST:
            lacking = max(0, each.let_frequency - text.lower().count(each.letter.lower()))
            holder = _HOLDERS.get(each.letter.lower(), next((w for w in _PLACES if each.letter in w), each.letter))
            clauses += [" and ".join([holder] * lacking)] if lacking else []
        elif kind is kinds.CapitalWordFrequency and each.capital_relation is Relation.AT_LEAST:
            clauses.append("we say " + " and ".join(["YES"] * each.capital_frequency))
        elif kind is kinds.Placeholders:
            places = [_PLACES[place % len(_PLACES)] for place in range(each.num_placeholders)]
            clauses.append("we ask for " + " and ".join(f"[{place}]" for place in places))
        elif kind is kinds.HighlightedSections:
            clauses.append("we mark " + " and ".join(["*this*"] * each.num_highlights))
    return clauses


def _shared_out(sentences: Sequence[str], parts: int) -> list[str]:
    size, more = divmod(len(sentences), parts)
    ends = [place * size + min(place, more) for place in range(parts + 1)]
    return [" ".join(sentences[begin:end]) for begin, end in pairwise(ends)]


def _surrounded(text: str, by_kind: dict[type, Any], topic: str) -> str:
    if kinds.Title in by_kind:
        text = f"<<About {topic}>>\n{text}"
    if kinds.Postscript in by_kind:
        text = f"{text}\n{by_kind[kinds.Postscript].postscript_marker} Take care."
    if kinds.EndPhrase in by_kind:
        text = f"{text} {by_kind[kinds.EndPhrase].end_phrase}"
    if kinds.JsonFormat in by_kind:
        text = json.dumps({"answer": text})
    if kinds.RepeatPrompt in by_kind:
        text = f"{by_kind[kinds.RepeatPrompt].prompt_to_repeat}\n{text}"
    if kinds.AllCapitals in by_kind:
        text = text.upper()
    if kinds.AllLowercase in by_kind:
        text = text.lower()
    return f'"{text}"' if kinds.QuotationMarks in by_kind else text
