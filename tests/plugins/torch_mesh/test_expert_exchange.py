"""Expert parallelism is rejected if tokens cannot be exchanged; `test_mesh.py` runs it on several processes."""

import sys

import pytest
import torch

from pipelinerl.plugins.torch_mesh.sharded_model import keep_own_experts
from pipelinerl.trainers.torch.mesh import ProcessMesh
from trainer_contract.errors import SpecError


def test_expert_parallelism_is_rejected_if_transformers_is_too_old_to_exchange_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)  # transformers 5.17 lacks it
    with pytest.raises(SpecError, match=r"cannot exchange tokens between processes; install transformers 5\.23"):
        keep_own_experts(torch.nn.Linear(2, 2), ProcessMesh(dp_shard=2), torch.device("cpu"))
