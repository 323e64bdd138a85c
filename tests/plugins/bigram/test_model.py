"""Files of the bigram model can be written and read back; files that hold another model are rejected."""

import json

import numpy as np
import pytest

from pipelinerl.errors import ModelError
from pipelinerl.plugins.bigram.model import PARAMETER, BigramModel


def test_bigram_model_is_unchanged_after_saving_and_loading(tmp_path):
    model = BigramModel.random(7, seed=3, context_length=40)
    model.save(tmp_path)
    loaded = BigramModel.load(tmp_path)
    assert np.array_equal(loaded.logits, model.logits)
    assert (loaded.context_length, loaded.vocab_size) == (40, 7)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bigram"


def test_saving_a_bigram_model_keeps_other_files_in_the_directory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    BigramModel.random(3, seed=0).save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("logits", "problem"),
    [
        (np.zeros((3, 4), dtype=np.float32), r"\[3, 4\]"),
        (np.zeros((3, 3)), "float64"),
        (np.zeros(3, dtype=np.float32), r"\[3\]"),
    ],
)
def test_bigram_logits_other_than_a_square_float32_matrix_are_rejected(logits, problem):
    with pytest.raises(ModelError, match=problem):
        BigramModel(logits=logits)


def test_directory_without_a_bigram_model_is_rejected(tmp_path):
    with pytest.raises(ModelError, match="must be a JSON object"):
        BigramModel.load(tmp_path)
    BigramModel.random(3, seed=0).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(ModelError, match=f"{PARAMETER}.*got type 'qwen2'"):
        BigramModel.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="must hold"):
        BigramModel.load(tmp_path)
