"""A model's vocabulary is compared with the policy's by size and by the text of each token id."""

import json
import shutil

import pytest

from pipelinerl.commands.check import findings, refuse
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.errors import ModelError
from pipelinerl.models.vocabulary import Vocabulary, refuse_other_vocabulary

POLICY = MODELS / "tiny_speller"


def changed(folder, name, change):
    """Copy the policy to `folder`, and change the JSON object in one of its files."""
    path = shutil.copytree(POLICY, folder / "other")
    table = json.loads((path / name).read_text())
    change(table)
    (path / name).write_text(json.dumps(table))
    return path


def swap_tokens(table):
    vocab, added = table["model"]["vocab"], {token["content"] for token in table["added_tokens"]}
    one, other = [token for token in vocab if token not in added][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def rename_added(table):
    last = table["added_tokens"][-1]
    table["model"]["vocab"].pop(last["content"], None)
    last["content"] = "<|other|>"


def test_model_with_the_same_or_more_tokens_is_accepted(tmp_path):
    more = changed(tmp_path, "config.json", lambda table: table.update(vocab_size=table["vocab_size"] + 64))
    assert refuse_other_vocabulary(POLICY, more) == refuse_other_vocabulary(POLICY, POLICY) == ""


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("config.json", lambda table: table.update(vocab_size=3), "has a vocabulary of 3 tokens, and the tokenizer"),
        ("tokenizer.json", swap_tokens, r"another tokenizer than .*: its token \d+ is '.', and the policy's is '.'"),
        ("tokenizer.json", lambda table: table["model"].pop("vocab"), "the vocabulary in .* cannot be read: 'vocab'"),
    ],
)
def test_model_with_fewer_or_other_tokens_is_rejected_by_check_and_at_the_start_of_a_run(
    name, change, sentence, tmp_path
):
    other = changed(tmp_path, name, change)
    with pytest.raises(ModelError, match=sentence):
        refuse_other_vocabulary(POLICY, other)
    keys = {
        "reference.path": ["objective=grpo_kl", f"reference.path={other}"],
        "critic.path": ["objective=ppo", f"critic.path={other}"],
        "domains.long_words.teacher": ['domains.long_words.loss="ref_kl"', f"domains.long_words.teacher={other}"],
    }
    for key, overrides in keys.items():
        with pytest.raises(ModelError, match=f"{key}: .*{sentence}"):
            refuse(load("tiny", overrides))


def test_added_token_with_another_text_is_a_warning(tmp_path):
    other = changed(tmp_path, "tokenizer.json", rename_added)
    overrides = ["objective=grpo_kl", f"reference.path={other}", "evaluation.problems=4"]
    warnings = [text for part, text in findings(load("tiny", overrides)) if part == "warning"]
    assert any(
        text.startswith("reference.path: ") and "lacks 1 of the added tokens" in text and "'<|other|>'" in text
        for text in warnings
    )


def test_vocabulary_is_read_from_both_layouts_of_tokenizer_files(tmp_path):
    added = [{"id": 2, "content": "<s>"}]
    for vocab in ({"a": 0, "b": 1}, [["a", -1.5], ["b", -2.5]]):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
        assert Vocabulary.of(tmp_path) == Vocabulary(own={0: "a", 1: "b"}, added={2: "<s>"})
