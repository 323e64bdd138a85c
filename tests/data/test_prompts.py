"""Prompts of a domain: order of system prompt and examples, unchanged ids, and no control tokens from user text."""

import json

import pytest

from pipelinerl.config.recipe import MODELS
from pipelinerl.data.problems import open_source
from pipelinerl.data.prompts import Prompts, Template
from pipelinerl.data.source import Split
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Message

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
def test_prompt_template_placeholders_are_replaced_by_field_values(text, expected):
    assert Template(text).render(FIELDS) == expected


@pytest.mark.parametrize("text", ["{zzz}", "{{ zzz }}", "{{ question }}{{ zzz }}", "{absent}", "{{ absent }}"])
def test_prompt_template_error_names_the_missing_field(text):
    field = "zzz" if "zzz" in text else "absent"
    with pytest.raises(RecipeError, match=f'field "{field}" is missing; available: choices, level, question'):
        Template(text).render(FIELDS)


@pytest.mark.parametrize(
    "expression",
    [
        "question.__class__.__mro__",
        "level + question",
        "choices[9]",
        "choices.append('c')",
        "level / 0",
        "range(10 ** 9)",
    ],
)
def test_prompt_template_that_fails_or_does_more_than_read_field_values_gives_a_recipe_error(expression):
    with pytest.raises(RecipeError, match="prompt_template: "):
        Template(f"{{{{ {expression} }}}}").render(FIELDS)


@pytest.mark.parametrize("text", ["{{ question", "{% for x in y %}", "{{ 1 | zzz }}"])
def test_invalid_prompt_template_is_rejected_when_it_is_created(text):
    with pytest.raises(RecipeError, match="not a valid Jinja template: line 1"):
        Template(text)


@pytest.mark.parametrize("text", ["Say {question}", "Say {{ question }}"])
@pytest.mark.parametrize("hostile", ["{{ 7 * 7 }}", "{level}", "{% raw %}", "<|im_end|>", "\\g<1>\\1"])
def test_field_values_are_never_parsed_as_a_prompt_template(text, hostile):
    assert Template(text).render({"question": hostile, "level": 3}) == f"Say {hostile}"


SHOTS = (Message("user", "1+1="), Message("assistant", "2"))
ROWS = [{"prompt": f"q{i}", "choices": ["x", "y"], "answer": "a"} for i in range(40)]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_problems(source, prompts, split=Split.TRAIN, **parameters):
    opened = open_source(source, domain="d", split=split, seed=0, parameters=parameters, prompts=prompts)
    return [opened.problem(index) for index in range(3)]


def test_system_prompt_and_few_shot_examples_precede_the_problem():
    own = (Message("system", "own"), Message("user", "u"))
    assert Prompts(system="s", few_shot=SHOTS).around(own) == (Message("system", "s"), *SHOTS, own[1])
    assert Prompts(few_shot=SHOTS).around(own) == (own[0], *SHOTS, own[1])
    assert Prompts(system="s").around(own[1:]) == (Message("system", "s"), own[1])
    assert Prompts().around(own) == own


@pytest.mark.parametrize("source", ["addition", "reasoning_gym:spell_backward", "files"])
def test_prompt_settings_apply_to_any_source_and_keep_the_id_and_split_of_a_problem(source, tmp_path):
    parameters = {"path": written(tmp_path / "a.jsonl", ROWS)} if source == "files" else {}
    prompts = Prompts(system="s", few_shot=SHOTS, template=Template("Think. {prompt}"))
    for split in Split:
        both = (first_problems(source, each, split, **parameters) for each in (Prompts(), prompts))
        for plain, dressed in zip(*both, strict=True):
            (question,) = plain.messages
            rendered = Message("user", f"Think. {question.content}")
            assert dressed.messages == (Message("system", "s"), *SHOTS, rendered)
            assert dressed.problem_id == plain.problem_id and dressed.ground_truth == plain.ground_truth


def test_error_for_an_empty_rendered_prompt_names_the_row(tmp_path):
    path = written(tmp_path / "a.jsonl", [row | {"hint": " "} for row in ROWS])
    with pytest.raises(
        RecipeError, match=r"a\.jsonl line \d+: prompt_template gives an empty prompt from the fields hint"
    ):
        first_problems("files", Prompts(template=Template("{hint}")), path=path)
    (problem, *_) = first_problems("files", Prompts(template=Template("say: {hint}")), path=path)
    assert problem.messages[-1].content == "say:  "
    with pytest.raises(RecipeError, match=r"d:[0-9a-f]+ has no question"):
        first_problems("addition", Prompts(template=Template("{% if false %}x{% endif %}")))


def test_prompt_template_may_write_the_whole_prompt_and_errors_name_row_and_field(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"left": i, "right": i, "answer": str(2 * i)} for i in range(40)])
    (problem, *_) = first_problems("files", Prompts(template=Template("{left}+{right}")), path=path)
    left, right = problem.messages[-1].content.split("+")
    assert int(left) + int(right) == int(problem.ground_truth)
    with pytest.raises(RecipeError, match=r'a\.jsonl line \d+: prompt_template: field "wrong" is missing; available: '):
        first_problems("files", Prompts(template=Template("{left}+{wrong}")), path=path)


def test_control_tokens_imitated_in_the_texts_of_users_and_data_are_encoded_as_text(tmp_path):
    """The rendered chat has as many control tokens with texts that imitate control tokens as with harmless texts."""
    tokenizer = ChatTokenizer.load(MODELS / "tiny_speller")
    control = sorted(tokenizer.eos_token_ids)
    spelling = tokenizer.decode(control[:1])
    assert spelling.startswith("<|")

    def tokens(text):
        shots = (Message("user", text), Message("assistant", text))
        rows = [{"prompt": f"{text} {i}", "note": text, "answer": text} for i in range(20)]
        prompts = Prompts(system=text, few_shot=shots, template=Template("{prompt} {{}} " + text + " {note}"))
        (problem, *_) = first_problems("files", prompts, path=written(tmp_path / "a.jsonl", rows))
        assert text in problem.messages[-1].content
        return tokenizer.encode_chat(problem.messages)

    harmless, hostile = tokens("hello"), tokens(spelling)
    assert sum(harmless.count(token) for token in control) == sum(hostile.count(token) for token in control)
    assert len(hostile) > len(harmless)
