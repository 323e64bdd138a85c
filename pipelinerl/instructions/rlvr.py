"""The instruction names of RLVR-IFeval: the function of open-instruct that verifies them, and its arguments.

    ground_truth: '{"func_name": "validate_word_constraint", "N": 200, "quantifier": "at most", "first_word": null, …}'

The requirements are those of IFEval, with additional comparisons in `Relation`. The verification is in `counts.py`,
`formats.py` and `wording.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pipelinerl.errors import RecipeError

#: For each function: the instruction's id, its parameters by the function's names, and constant parameters.
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
FUNCTION: Final = "func_name"


def of_function(truth: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id and the parameters of the instruction that a function stands for.

    Raises:
        RecipeError: open-instruct has no such function.
    """
    name = truth[FUNCTION]
    if name not in _FUNCTIONS:
        raise RecipeError(f"{FUNCTION} must be one of {', '.join(_FUNCTIONS)}, got {name!r}")
    id, renamed, constant = _FUNCTIONS[name]
    return id, {**{ours: truth.get(theirs) for theirs, ours in renamed.items()}, **constant}
