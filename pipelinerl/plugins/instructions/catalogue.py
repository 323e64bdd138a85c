"""The instructions by id, their scoring, and the parser of a problem's instructions. The parser reads four layouts:

    instructions: [{"id": "punctuation:no_comma"}, {"id": "keywords:existence", "keywords": ["sea"]}]
    instruction_id_list: ["punctuation:no_comma", …]   with   kwargs: [{}, …]      IFEval's own; null means absent
    ground_truth: '[{"instruction_id": ["punctuation:no_comma", …], "kwargs": [null, …]}]'     open-instruct's, as text
    ground_truth: '{"func_name": "validate_no_commas", "N": null, …}'                       RLVR-IFeval's

To add an instruction, write its struct in `kinds.py`, with the id as its tag, and add it to `KINDS`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions.instruction import Instruction, id_of
from pipelinerl.plugins.instructions.kinds import KINDS

#: All instructions by id.
CATALOGUE: Final[Mapping[str, type[Instruction]]] = {id_of(kind): kind for kind in KINDS}

#: RLVR-IFeval identifies an instruction by the open-instruct function that verifies it. Each entry maps a function to
#: three things: the instruction's id, our names of the function's parameters, and parameters with constant values.
_FUNCTIONS: Final[Mapping[str, tuple[str, Mapping[str, str], Mapping[str, str]]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency", {"word": "keyword", "N": "frequency"}, {"relation": "exactly"},
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}, {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {}),
    "validate_word_constraint": (
        "length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}, {},
    ),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences", {"N": "num_sentences", "quantifier": "relation"}, {},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"}, {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": (
        "detectable_format:number_highlighted_sections", {"N": "num_highlights"}, {},
    ),
    "validate_sections": (
        "detectable_format:multiple_sections", {"N": "num_sections", "section_splitter": "section_spliter"}, {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency", {"N": "capital_frequency", "quantifier": "capital_relation"}, {},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}  # fmt: skip
_FUNCTION: Final = "func_name"

_LAYOUTS: Final = (
    "instructions, instruction_id_list with kwargs, or its ground truth instruction_id with kwargs or func_name"
)


def make_instruction(id: str, parameters: Mapping[str, Any]) -> Instruction:
    """Build an instruction; a parameter of None counts as absent, and 3.0 is read as 3.

    Raises `RecipeError` if there is no such instruction, or a parameter is wrong, missing or unknown.
    """
    if id not in CATALOGUE:
        near = difflib.get_close_matches(id, CATALOGUE, n=1, cutoff=0.0)
        raise RecipeError(f"there is no instruction {id!r}; the nearest is {near[0] if near else 'none'}")
    given = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in parameters.items()
        if value is not None
    }
    try:
        return msgspec.convert({**given, "id": id}, CATALOGUE[id])
    except msgspec.ValidationError as error:
        raise RecipeError(f"instruction {id} with {given!r:.200}: {error}") from None


def instructions_of(metadata: Mapping[str, Any], ground_truth: str = "") -> tuple[Instruction, ...]:
    """Parse the instructions of a problem. Raises `RecipeError` if it names none, or an invalid one."""
    named = list(_named(metadata, ground_truth))
    if not named:
        raise RecipeError(f"the problem names no instructions; its metadata must hold {_LAYOUTS}")
    return tuple(make_instruction(id, parameters) for id, parameters in named)


def _named(metadata: Mapping[str, Any], ground_truth: str) -> list[tuple[str, Mapping[str, Any]]]:
    if "instructions" in metadata:
        listed = metadata["instructions"]
        if not isinstance(listed, Sequence) or not all(isinstance(each, Mapping) and "id" in each for each in listed):
            raise RecipeError(f"instructions must be a list of objects with an id, got {listed!r:.200}")
        return [(str(each["id"]), {key: value for key, value in each.items() if key != "id"}) for each in listed]
    if "instruction_id_list" in metadata:
        return _paired(metadata["instruction_id_list"], metadata.get("kwargs"))
    try:
        truth = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return []
    listed = [each for each in (truth if isinstance(truth, list) else [truth]) if isinstance(each, dict)]
    pairs: list[tuple[str, Mapping[str, Any]]] = []
    for each in listed:
        if _FUNCTION in each:
            function = each[_FUNCTION]
            if function not in _FUNCTIONS:
                raise RecipeError(f"{_FUNCTION} must be one of {', '.join(_FUNCTIONS)}, got {function!r}")
            id, renamed, constant = _FUNCTIONS[function]
            pairs.append((id, {**{ours: each.get(theirs) for theirs, ours in renamed.items()}, **constant}))
        pairs += _paired(each["instruction_id"], each.get("kwargs")) if "instruction_id" in each else []
    return pairs


def _paired(ids: Any, parameters: Any) -> list[tuple[str, Mapping[str, Any]]]:
    ids, parameters = _read(ids), _read(parameters)
    if not isinstance(ids, list) or not (parameters is None or isinstance(parameters, list)):
        raise RecipeError(f"ids of instructions and kwargs must be lists, got {ids!r:.100} and {parameters!r:.100}")
    given = [{}] * len(ids) if parameters is None else [each or {} for each in parameters]
    if len(given) != len(ids) or not all(isinstance(each, dict) for each in given):
        raise RecipeError(f"each of {len(ids)} instructions must have an object of kwargs, got {parameters!r:.200}")
    return [(str(id), each) for id, each in zip(ids, given, strict=True)]


def _read(value: Any) -> Any:
    """Decode a value that is given as JSON text, and convert a tuple or an array to a list."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return list(value) if isinstance(value, tuple) or hasattr(value, "tolist") else value


class Matching(StrEnum):
    """Strictness of the check; mode `loose` also accepts an answer if one of its `variants` follows the instruction."""

    STRICT = "strict"
    LOOSE = "loose"


class Score(StrEnum):
    """Rule for the reward of an answer that follows some of its problem's instructions."""

    SHARE = "share"
    """The share of instructions that the answer follows."""
    ALL = "all"
    """1 if the answer follows all instructions, else 0."""

    def of(self, followed: Sequence[bool]) -> float:
        """Return the reward; `followed` says for each instruction whether the answer follows it."""
        return sum(followed) / len(followed) if self is Score.SHARE else float(all(followed))


def followed(asked: Sequence[Instruction], answer: str, matching: Matching = Matching.STRICT) -> list[bool]:
    """Return for each instruction whether the answer follows it; a blank answer follows none."""
    texts = [text for text in (variants(answer) if matching is Matching.LOOSE else [answer]) if text.strip()]
    return [any(each.follows(text) for text in texts) for each in asked]


def variants(answer: str) -> list[str]:
    """Return the texts that loose matching tries: the answer as it is, without its first line, without its last line,
    and without both.

    Each of these texts is also tried without asterisks.
    """
    lines = answer.split("\n")
    cuts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys(text for cut in cuts for text in (cut, cut.replace("*", ""))))
