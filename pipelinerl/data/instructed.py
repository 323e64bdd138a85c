"""The source `instructions`: requests to write about a topic, with instructions that can be checked.

    parameters = { min_instructions = 1, max_instructions = 3, level = 1, sentences = 3,
                   kinds = ["punctuation:no_comma", …], topics = ["the sea", …] }

Problem i is a pure function of split, seed and i. Its instructions are compatible: its ground truth is an answer that
follows all of them (`reference_answers.py`). Its metadata lists them in the form that the verifier
`instruction_following` reads, and a tag gives their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from pipelinerl import rng
from pipelinerl.data.drafts import Draft
from pipelinerl.data.generated import GeneratedSource, parameters_of
from pipelinerl.data.reference_answers import DEFAULT_SENTENCES, answer_following
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.instructions.catalogue import Asked, made
from pipelinerl.types import Message

#: Number of instruction sets tried for a problem; some sets contradict themselves.
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

#: Draws an instruction's parameters, given a random generator, the level and the request.
_Draw = Callable[[np.random.Generator, int, str], dict[str, Any]]


def _up_to(noise: np.random.Generator, low: int, high: int) -> int:
    """Return an integer from `low` to `high`, both included."""
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


def _keyword(noise: np.random.Generator, level: int, _: str) -> dict[str, Any]:
    return {"keyword": _one(noise, _WORDS), "frequency": _up_to(noise, 1, level + 1), "relation": "at least"}


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


#: How to draw parameters, by kind of instruction. The kind that asks for another language is missing, since reference
#: answers are in English.
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
    "keywords:frequency": _keyword,
    "keywords:letter_frequency": _letter,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "length_constraints:number_paragraphs": lambda noise, level, _: {"num_paragraphs": _up_to(noise, 2, 2 + level)},
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": lambda noise, level, request: {},
    "startend:end_checker": lambda noise, level, _: {"end_phrase": _one(noise, _ENDINGS)},
    "startend:quotation": lambda noise, level, request: {},
}

#: At most one kind of each set is chosen: kinds of a set conflict in the answer's layout, its case, its beginning or
#: its end.
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
    """Scale of the instructions' numbers: 1 asks for a few words or points, 5 for five times as many."""
    sentences: Annotated[int, Meta(ge=1, le=15)] = DEFAULT_SENTENCES
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
    """Open the source `instructions`. Raises `RecipeError` for unknown parameters or incompatible instructions."""
    parameters = parameters_of(request, _Parameters, source="instructions")
    return GeneratedSource(
        lambda key: _drawn(parameters, key, where=request.where),
        domain=request.domain,
        split=request.split,
        seed=request.seed,
        prompts=request.prompts,
    )


def _drawn(parameters: _Parameters, key: int, *, where: str) -> Draft:
    """Return the first compatible set of instructions for this key."""
    for attempt in range(_TRIES):
        noise = rng.generator(key, "instructions", attempt)
        topic = _one(noise, parameters.topics)
        request = _one(noise, _REQUESTS).format(topic)
        instructions = _composed(parameters, noise, request)
        answer = None
        if len(instructions) >= parameters.min_instructions:
            answer = answer_following(instructions, topic, noise, sentences=parameters.sentences)
        if answer is not None:
            metadata = {
                "instructions": [{"id": each.id, **msgspec.to_builtins(each.instruction)} for each in instructions]
            }
            return Draft(
                messages=(
                    Message("user", "\n".join([request, *(each.instruction.sentence for each in instructions)])),
                ),
                ground_truth=answer,
                metadata=metadata,
                tags=(f"instructions={len(instructions)}",),
            )
    raise RecipeError(
        f"{where}.parameters: in {_TRIES} tries no {parameters.min_instructions} of these kinds could be "
        "combined; lower min_instructions or name other kinds"
    )


def _composed(parameters: _Parameters, noise: np.random.Generator, request: str) -> list[Asked]:
    """Draw instructions whose kinds do not exclude one another, up to the drawn number."""
    wanted = _up_to(noise, parameters.min_instructions, parameters.max_instructions)
    chosen: list[str] = []
    for place in noise.permutation(len(parameters.kinds)):
        kind = parameters.kinds[int(place)]
        excluded = any(kind in group and not group.isdisjoint(chosen) for group in _ONE_OF)
        if len(chosen) < wanted and kind not in chosen and not excluded:
            chosen.append(kind)
    return [made(kind, _DRAWS[kind](noise, parameters.level, request)) for kind in chosen]
