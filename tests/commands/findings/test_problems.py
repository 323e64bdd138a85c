"""`pipelinerl check` checks the instructions of every problem before a run."""

import json

import pytest

from pipelinerl.commands.findings.problems import verifier_findings
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError

NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def config_of(**domain):
    table = to_table(load("tiny", ["evaluation.problems=4"]))
    return parse(table | {"domains": [{"name": "d", "verifier": "instruction_following", **domain}]})


def of_rows(folder, *last):
    rows = [{"key": n, "prompt": f"say {n}", **NO_COMMA} for n in range(300)]
    rows += [{"key": 300, "prompt": "x", **each} for each in last]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    fields = {"answer_field": "key", "metadata_fields": ["instruction_id_list", "kwargs"]}
    return config_of(source="files", parameters={"path": str(path), **fields})


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


def test_check_counts_instructions_only_in_domains_with_the_instruction_verifier():
    config = config_of(source="instructions", parameters={"kinds": ["punctuation:no_comma", "startend:quotation"]})
    ((_, text),) = verifier_findings(config, config.domains[0])
    assert "of 260 problems" in text and "startend:quotation" in text
    other = config_of(source="addition", verifier="math_answer")
    assert list(verifier_findings(other, other.domains[0])) == []
