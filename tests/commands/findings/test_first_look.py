"""Bad data, and messages that the chat template rejects, are reported before any process starts."""

import json

import pytest

from pipelinerl.commands.findings.problems import FIRST, refuse_problems
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from tests.models.test_tokenizer import NO_SYSTEM, model_with

GOOD = [{"prompt": f"say {number}", "answer": str(number)} for number in range(9)]
WORDS = {"instruction_id_list": ["punctuation:no_coma"]}


def config_of(tmp_path, *rows, model=None, **domain):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*GOOD, *rows]))
    own = {"name": "d", "source": "files", "parameters": {"path": str(tmp_path / "rows.jsonl")}, **domain}
    overrides = [] if model is None else [f"model.path={model}"]
    return parse(to_table(load("tiny", overrides)) | {"domains": [own]})


@pytest.mark.parametrize(
    ("row", "domain", "sentence"),
    [
        ({"prompt": "a"}, {}, 'field "answer" is missing or null; the row has prompt'),
        ({"answer": "a"}, {}, 'field "prompt" is missing or null; the row has answer'),
        ({"prompt": 3, "answer": "a"}, {}, "field 'prompt' must be a text, or messages with role"),
        ({"prompt": "a", "answer": "1", "metadata": [1]}, {}, "field 'metadata' must be an object, got [1]"),
        ({"prompt": " \n", "answer": "a"}, {}, 'field "prompt" is empty'),
        (
            {"prompt": "", "answer": "a"},
            {"prompt_template": "{prompt} "},
            "gives an empty prompt from the fields prompt",
        ),
        (
            {"prompt": "a", "answer": " $ "},
            {},
            "the ground truth ' $ ' is empty, but math_answer compares answers with it",
        ),
        ({"prompt": "a", "answer": "9" * 4001}, {}, "the ground truth has 4001 characters, and math_answer takes"),
        ({"prompt": "a", "answer": "b"}, {"verifier": "oubliette"}, "has no tests: its metadata must have one of"),
    ],
)
def test_error_names_the_invalid_row_of_a_data_file_and_what_is_wrong_with_it(row, domain, sentence, tmp_path):
    tests = {"metadata": {"tests": [{"input": "", "output": ""}]}} if "verifier" in domain else {}
    config = config_of(tmp_path, row, **domain)
    if tests:
        lines = [json.dumps(good | tests) for good in GOOD]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines, json.dumps(row)]))
    with pytest.raises(RecipeError) as refused:
        refuse_problems(config, FIRST)
    assert str(refused.value).startswith(f"{tmp_path}/rows.jsonl line 10: ") and sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(good | tests) for good in GOOD))
    refuse_problems(config, FIRST)


def test_error_names_the_data_row_with_an_unknown_instruction(tmp_path):
    config = config_of(tmp_path, verifier="instruction_following")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b", "metadata": WORDS}))
    with pytest.raises(RecipeError, match=r"rows\.jsonl line 1: there is no instruction 'punctuation:no_coma'"):
        refuse_problems(config, FIRST)


@pytest.mark.parametrize(
    ("few_shot", "sentence"),
    [
        ([], "messages of system, user: the chat template cannot render 2 messages: System role not supported"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "of system, user, assistant, user"),
    ],
)
def test_error_names_the_domain_whose_messages_the_chat_template_rejects(few_shot, sentence, tmp_path):
    model = model_with(tmp_path, NO_SYSTEM)
    refuse_problems(config_of(tmp_path, model=model), FIRST)
    config = config_of(tmp_path, model=model, system_prompt="be brief", few_shot=few_shot)
    with pytest.raises(RecipeError) as refused:
        refuse_problems(config, FIRST)
    message = str(refused.value)
    assert message.startswith("domains.d: ") and sentence in message and message.endswith(f"(the template of {model})")


def test_error_about_an_invalid_row_of_a_user_data_source_names_the_users_function(tmp_path):
    code = "def rows():\n    return [{'prompt': f'q{i}', 'answer': '' if i == 7 else str(i)} for i in range(9)]\n"
    (tmp_path / "mine.py").write_text(code)
    config = config_of(tmp_path, source=f"{tmp_path}/mine.py:rows", parameters={})
    with pytest.raises(RecipeError, match=r"^rows row 7: the ground truth .* is empty"):
        refuse_problems(config, FIRST)
