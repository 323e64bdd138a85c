"""The replica computes the log-probs that a torch engine reports, in the engine's own arithmetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.config.sections import ModelSection
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.replica import EngineReplica
from pipelinerl.enums import WeightFormat
from pipelinerl.models.checkpoint import load_model
from pipelinerl.training.packing import alone
from tests.fakes.engine_options import engine_options
from tests.fakes.rollouts import rollout
from tests.fakes.torch_rows import Row, decode, start
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, WeightDType

MODEL: Path = ModelSection(path="shipped:tiny_speller").resolved


@pytest.mark.parametrize(
    ("dtype", "weights"), [(WeightDType.FLOAT32, WeightFormat.INT8), (WeightDType.BFLOAT16, WeightFormat.NATIVE)]
)
def test_replica_with_an_engines_weights_computes_the_log_probs_that_it_reports(dtype, weights):
    options = engine_options(model_path=MODEL, dtype=dtype, wire_dtype=dtype, weights=weights, device=Device.CPU)
    engine, replica = load_runner(options, starts_early=False), EngineReplica(options)
    prompts = [[2, 20 + row, *range(10, 13 + row), 4, 3] for row in range(3)]
    rows = [Row(prompt, 0.8, key) for key, prompt in enumerate(prompts)]
    start(engine, rows)
    decode(engine, rows, 6)
    made = []
    for row, prompt in enumerate(prompts):
        one = rollout(prompt=prompt, sampled=rows[row].sampled[: 6 - row])
        theirs = np.array(rows[row].logprobs[: 6 - row], np.float32)
        made.append(replace(one, turns=(replace(one.turns[0], behavior_logprobs=theirs),), temperature=0.8))
    batch = alone(made)
    given = {name: each.detach() for name, each in load_model(MODEL, dtype=dtype).named_parameters()}
    replica.hold(given.items())
    (ours,) = replica.forward([batch])
    np.testing.assert_allclose(ours[batch.loss_mask], batch.behavior_logprobs[batch.loss_mask], atol=1e-5)
    halved = copied((name, each / 2) for name, each in given.items())
    (other,) = replica.forward_at([batch], halved)
    assert np.abs(other - ours).max() > 0.01
    (again,) = replica.forward([batch])
    np.testing.assert_array_equal(again, ours)
