"""The torch trainer and NCCL weight groups with the oldest supported transformers and torch, in another environment."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

PYTHON = os.environ.get("PIPELINERL_OLD_PYTHON")
ROOT = Path(__file__).parents[3]
TESTS = "packed_equals_padded or checkpointing or bf16_is_close or compiled_once or test_nccl"
FILES = [
    "tests/trainers/torch/test_trainer.py",
    "tests/trainers/torch/packed/test_varlen.py",
    "tests/weights/broadcast/test_nccl.py",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON is None, reason="PIPELINERL_OLD_PYTHON does not name an interpreter")
@pytest.mark.parametrize("module", ["pipelinerl.trainers.torch.trainer", "pipelinerl.plugins.torch_mesh.mesh_worker"])
def test_torch_trainer_can_be_imported_with_the_oldest_supported_torch_and_transformers(module):
    assert PYTHON is not None
    subprocess.run([PYTHON, "-c", f"import {module}"], cwd=ROOT, check=True, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON is None, reason="PIPELINERL_OLD_PYTHON does not name an interpreter")
def test_selected_torch_tests_pass_with_the_oldest_supported_torch_and_transformers():
    assert PYTHON is not None
    argv = [PYTHON, "-m", "pytest", "-q", "-n", "0", *FILES, "-k", TESTS]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-4000:]
