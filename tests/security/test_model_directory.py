"""Code in a hostile model directory never runs, even if a user at a terminal could grant permission."""

import builtins
import json
import resource
import shutil
import time
from pathlib import Path

import pytest

import pipelinerl.models
from pipelinerl.errors import ModelError, UserError
from pipelinerl.models.chat_template import check_chat_template
from pipelinerl.models.checkpoint import (
    check_directory,
    check_values,
    check_weights,
    model_dtype,
    model_type,
    refuse_quantised,
    weight_files,
)
from pipelinerl.models.decoder_config import read_config
from pipelinerl.models.model_shape import mixture_of, read_shape
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.trainers.torch.packed_model import load_config
from pipelinerl.types import Message
from tests.security.model_mutants import mutant
from trainer_contract.errors import SpecError

SPELLER = Path(pipelinerl.models.__file__).with_name("tiny_speller")

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()
from transformers import PretrainedConfig
class Own(PretrainedConfig):
    model_type = "own"
"""


def test_code_in_a_model_directory_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    mark, model = tmp_path / "ran", tmp_path / "model"
    model.mkdir()
    (model / "own.py").write_text(CODE.format(mark=str(mark)))
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecError):
        load_config(model)
    with pytest.raises(ModelError):
        ChatTokenizer.load(model)
    assert not mark.exists()


def read_as_commands_do(path):
    """Read everything that commands such as `check` and `run` read from a model directory, and render one chat."""
    check_directory(path)
    refuse_quantised(path)
    check_chat_template(path)
    model_type(path)
    tokenizer = ChatTokenizer.load(path)
    tokenizer.decode(tokenizer.encode_chat([Message("user", "an unusual word: \u0378")]))
    tokenizer.encode("a\U000f0000")
    read_shape(path)
    mixture_of(path)
    model_dtype(path)
    check_weights(path)
    read_config(path)
    check_values(path, most_bytes=1 << 20)


@pytest.mark.parametrize(
    "seeds",
    [pytest.param([*range(150), 3404], id="150"), pytest.param(range(150, 5150), id="5000", marks=pytest.mark.slow)],
)
def test_damaged_model_directory_is_either_read_or_rejected_with_a_one_sentence_error(seeds, tmp_path):
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        path = tmp_path / str(seed)
        mutation = mutant(SPELLER, path, seed)
        began = time.thread_time()
        try:
            read_as_commands_do(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1200, mutation
            assert "; " in str(error), f"{mutation}: no remedy in {error}"
        except BaseException as error:
            error.add_note(mutation)
            raise
        assert time.thread_time() - began < 5, mutation
        shutil.rmtree(path)
    assert len(seeds) // 3 < refused < len(seeds), "most mutants are refused, and some are harmless"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10, "kilobytes"


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"])
def test_weight_index_with_paths_outside_its_directory_is_rejected(name, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(SPELLER, path)
    shutil.copy(path / "model.safetensors", tmp_path / "x.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (check_directory, weight_files, check_weights):
        with pytest.raises(ModelError, match=r"may only name safetensors files next to it, got .*; copy the model"):
            read(path)


@pytest.mark.parametrize("layers", [-1, 0, 10**9, None, "2", 2000])
def test_impossible_layer_count_is_rejected_before_the_model_is_built(layers, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(SPELLER, path)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": layers, "layer_types": None}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"num_hidden_layers in .*config.json must be|names 2,000 layers, and the files"
    ):
        check_weights(path)


@pytest.mark.parametrize("text", ["\ud800", "a<|end|>\udfff"])
def test_text_with_a_lone_surrogate_is_rejected_by_the_tokenizer(text):
    tokenizer = ChatTokenizer.load(SPELLER)
    for encode in (lambda: tokenizer.encode_chat([Message("user", text)]), lambda: tokenizer.encode(text)):
        with pytest.raises(ModelError, match="half of a character"):
            encode()
