"""Bad data, messages that the template rejects and wrong instructions are reported before any process starts."""

import json

import pytest

from pipelinerl.commands.findings.problems import FIRST, refuse_problems, verifier_findings
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from tests.models.test_tokenizer import NO_SYSTEM, model_with

GOOD = [{"prompt": f"say {number}", "answer": str(number)} for number in range(9)]


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
            "the ground truth ' $ ' is empty, but math_answer compares answers with",
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


NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def of_rows(folder, *last):
    rows = [{"key": n, "prompt": f"say {n}", **NO_COMMA} for n in range(300)]
    rows += [{"key": 300, "prompt": "x", **each} for each in last]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    fields = {"answer_field": "key", "metadata_fields": ["instruction_id_list", "kwargs"]}
    domain = {"name": "d", "source": "files", "verifier": "instruction_following"}
    domain["parameters"] = {"path": str(path), **fields}
    return parse(to_table(load("tiny", ["evaluation.problems=4"])) | {"domains": [domain]})


def test_check_counts_the_instructions_in_a_file_with_the_layout_of_the_public_data_sets(tmp_path):
    config = of_rows(tmp_path)
    ((part, text),) = verifier_findings(config, config.domains[0])
    assert part == "instructions" and text.endswith("problems, punctuation:no_comma 100%")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}, "no instruction 'punctuation:no_coma'"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "missing required field `end_phrase`"),
        ({}, "the problem names no instructions"),
    ],
)
def test_check_names_the_wrong_instruction_of_one_row_among_hundreds(tmp_path, row, sentence):
    config = of_rows(tmp_path, row)
    refused = []
    for seed in range(8):  # with other seeds, the row is in other splits
        row_config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        try:
            list(verifier_findings(row_config, config.domains[0]))
        except RecipeError as error:
            refused.append(str(error))
    assert len(refused) == 8 and all(sentence in text for text in refused)
