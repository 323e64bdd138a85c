"""Templates: filled placeholders, a sandbox, and errors that name missing fields."""

from __future__ import annotations

import pytest

from pipelinerl.data.templates import Template
from pipelinerl.errors import RecipeError

FIELDS = {"question": "1 + 1", "choices": ["a", "b"], "level": 3, "absent": None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Solve {question}.", "Solve 1 + 1."),
        ("{question} in \\boxed{}", "1 + 1 in \\boxed{}"),
        ("{question} in \\boxed{{}}", "1 + 1 in \\boxed{}"),
        ('{question} as {"answer": …} or {1, 2}', '1 + 1 as {"answer": …} or {1, 2}'),
        ("{{ question }} in \\boxed{}", "1 + 1 in \\boxed{}"),
        ("{%- for c in choices %}{{ loop.index }}. {{ c }}\n{% endfor %}", "1. a\n2. b\n"),
        ("{{ question }}{% if absent is defined %}!{% endif %}\n", "1 + 1\n"),
        ("no field", "no field"),
    ],
)
def test_placeholders_are_replaced_by_field_values(text: str, expected: str) -> None:
    assert Template(text).render(FIELDS) == expected


@pytest.mark.parametrize("text", ["{zzz}", "{{ zzz }}", "{{ question }}{{ zzz }}", "{absent}", "{{ absent }}"])
def test_error_names_the_missing_field(text: str) -> None:
    field = "zzz" if "zzz" in text else "absent"
    with pytest.raises(RecipeError, match=f'field "{field}" is missing; available: choices, level, question'):
        Template(text).render(FIELDS)


@pytest.mark.parametrize(
    "text",
    [
        "{{ question.__class__.__mro__ }}",
        "{{ level + question }}",
        "{{ choices[9] }}",
        "{{ choices.append('c') }}",
        "{{ level / 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_template_can_access_only_fields_and_its_failures_are_reported(text: str) -> None:
    with pytest.raises(RecipeError, match="prompt_template: "):
        Template(text).render(FIELDS)


@pytest.mark.parametrize("text", ["{{ question", "{% for x in y %}", "{{ 1 | zzz }}"])
def test_invalid_template_is_rejected_when_it_is_created(text: str) -> None:
    with pytest.raises(RecipeError, match="not a valid Jinja template: line 1"):
        Template(text)


@pytest.mark.parametrize("text", ["Say {question}", "Say {{ question }}"])
@pytest.mark.parametrize("hostile", ["{{ 7 * 7 }}", "{level}", "{% raw %}", "<|im_end|>", "\\g<1>\\1"])
def test_field_values_are_never_parsed_as_template(text: str, hostile: str) -> None:
    assert Template(text).render({"question": hostile, "level": 3}) == f"Say {hostile}"
