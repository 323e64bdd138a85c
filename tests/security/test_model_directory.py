"""What a model directory can do to whoever reads it: its code is never run, whoever sits at the terminal."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.trainers.torch.packed_model import load_config
from trainer_contract.errors import SpecError

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()
from transformers import PretrainedConfig
class Own(PretrainedConfig):
    model_type = "own"
"""


def test_code_beside_a_configuration_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
