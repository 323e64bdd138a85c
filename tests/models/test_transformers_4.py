"""transformers 4 loads the checkpoints of models that it wrote, family by family, as it loads those models.

`PIPELINERL_TRANSFORMERS_4_PYTHON=…/bin/python pytest -m slow tests/models/test_transformers_4.py` runs this in an
environment of yours with transformers 4.57 and torch.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.models.weight_writer import WeightWriter
from tests.families.reloaded import reloaded
from trainer_contract.types import ParameterInfo

PYTHON: Final = os.environ.get("PIPELINERL_TRANSFORMERS_4_PYTHON")
FAMILIES: Final = Path(__file__).parents[1] / "families"
#: Families whose log-probs differ between the two versions of transformers, for the directory that version 4 wrote.
OF_VERSION: Final = frozenset({"bamba", "gemma2", "olmo3", "vaultgemma", "zamba2"})


def output_of(script, *arguments):
    assert PYTHON is not None
    command = [PYTHON, str(FAMILIES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=500).stdout


def checkpoint_of(model, target):
    """Write a checkpoint of the model with other weights; return None if the product refuses the model."""
    try:
        named = {name: each.detach() * 1.125 for name, each in load_model(model).named_parameters()}
    except ModelError:
        return None
    target.mkdir()
    copy_model_files(model, target)
    layout = [ParameterInfo(name, tuple(each.shape), "float32") for name, each in named.items()]
    WeightWriter.of(model, layout).write(target / "model.safetensors", named.items())
    return target


def distance(ours, theirs):
    return float(np.abs(np.subtract(ours["logprobs"], theirs["logprobs"])).max())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(PYTHON is None, reason="PIPELINERL_TRANSFORMERS_4_PYTHON does not name an interpreter")
def test_transformers_4_loads_checkpoints_of_its_own_models(tmp_path):
    output_of("zoo.py", tmp_path)
    pairs = {
        model: saved
        for model in sorted(tmp_path.iterdir())
        if (saved := checkpoint_of(model, tmp_path / f"{model.name}.new")) is not None
    }
    old = json.loads(output_of("reloaded.py", *pairs, *pairs.values()))
    seen, of_version, wrong = [], set(), {}
    for model, saved in pairs.items():
        before, after = old[str(model)], old[str(saved)]
        if "error" in before:
            continue  # this transformers does not load what it has written
        if after.get("tensors") != before["tensors"]:
            wrong[model.name] = after
        elif distance(before, reloaded(model)) > 1e-3:
            of_version.add(model.name)
        elif distance(after, reloaded(saved)) > 1e-3:
            wrong[model.name] = distance(after, reloaded(saved))
        else:
            seen.append(model.name)
    assert not wrong
    assert {"mixtral", "qwen3_moe", "gpt_neox", "apertus", "glm4_moe", "gpt2"} <= {*seen}
    assert of_version <= OF_VERSION
