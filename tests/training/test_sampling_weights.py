"""Old log-probs computed with the sampling weights, compared with those of an engine that gets new weights in flight.

If the engine recomputes its KV cache after an update, they agree within 1e-5. In continue mode, the cache was written
by older weights, so log-probs after an update differ: no pass with one version's weights can reproduce that cache.
"""

import asyncio
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import OnUpdate
from pipelinerl import rng
from pipelinerl.config.recipe import MODELS
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import from_options
from pipelinerl.enums import OldLogprobs
from pipelinerl.numerics.causes import figures, sampled_tokens
from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.weight_history import WeightHistory
from pipelinerl.types import Outcome, Rollout, Turn, Verdict, VersionSpan
from tests.fakes.batches import batch_of, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import Device, TrainerSpec

MODEL = MODELS / "tiny_speller"
VERSIONS = 3
TOLERANCE = 1e-5
OBJECTIVE = resolve("ppo_recomputed")


@pytest.fixture(scope="module")
def step():
    """Return a train step whose policy is at version 2, with a history of versions 0, 1 and 2, which differ clearly."""
    policy = TorchTrainer()
    policy.init_worker(TrainerSpec(model_path=MODEL, device=Device.CPU))
    history = WeightHistory(policy.weight_layout())
    passes = ForwardPasses(policy=policy, old_logprobs=OldLogprobs.SAMPLING_WEIGHTS, history=history)
    made = step_on(passes)
    draw = rng.generator(0, "sampling weights")
    for version in range(VERSIONS):
        made.will_sample(version, acceptance=VERSIONS)
        if version < VERSIONS - 1:
            rollouts = tuple(
                rollout(reward=reward, sampled=draw.integers(5, 50, 20).tolist(), version=version, logprob=-2.0)
                for reward in (0.0, 1.0)
            )
            trained(made, [replace(group(version), rollouts=rollouts)], producing=version + 1)
    return made


def trained(step, groups, *, producing):
    result = step.accumulate(batch_of(groups, OBJECTIVE, producing=producing, token_budget=2048))
    step.apply(result, learning_rates=[3e-3])


async def sample(history, on_update, seed, *, samples):
    """Sample sixteen long answers, `samples` per prompt, from an engine that gets versions 1 and 2 during sampling."""
    options = EngineOptions(
        model_path=MODEL, model_id="m", slots=8, max_waiting=64, context_length=64, device=Device.CPU, threads=1
    )
    engine = cast(BatchingEngine, from_options(options))
    await engine.start()
    draw = rng.generator(seed, "requests")
    requests = [
        ChatCompletionRequest(
            prompt_token_ids=draw.integers(5, 57, 9).tolist(),
            n=samples,
            max_tokens=48,
            temperature=(0.8, 1.3)[number % 2],
            seed=number,
            return_token_ids=True,
        )
        for number in range(16 // samples)
    ]
    answers = [asyncio.create_task(engine.complete(request)) for request in requests]
    for version in range(1, VERSIONS):
        engine.staging()[:] = torch.from_numpy(np.concatenate(list(history.weights(version).values())))
        engine.finish_staging()
        until = engine.metrics().generated_tokens_total + 64
        while engine.metrics().generated_tokens_total < until and not all(each.done() for each in answers):
            await asyncio.sleep(0.001)
        await engine.commit(version=version, epoch=1, on_update=on_update)
    done = await asyncio.gather(*answers)
    await engine.close()
    return [
        Rollout(
            turns=(
                Turn(
                    context_token_ids=np.array(request.prompt_token_ids, np.int32),
                    token_ids=np.array(choice.token_ids, np.int32),
                    behavior_logprobs=np.array(choice.token_logprobs, np.float32),
                    spans=tuple(VersionSpan(*span) for span in choice.version_spans or ()),
                ),
            ),
            verdict=Verdict(outcome=Outcome.CORRECT, reward=float(sum(choice.token_ids) % 7)),
            finish_reason="stop",
            temperature=request.temperature,
        )
        for request, answer in zip(requests, done, strict=True)
        for choice in answer.choices
    ]


def in_flight(step, on_update, *, samples):
    """Return rollouts of three versions, some of which mix versions; retry if they all ended before the updates."""
    assert step.passes.history is not None
    for attempt in range(5):
        rollouts = asyncio.run(sample(step.passes.history, on_update, attempt, samples=samples))
        spans = [one.turns[0].spans for one in rollouts]
        if {span.model_version for each in spans for span in each} == set(range(VERSIONS)) and max(map(len, spans)) > 1:
            return [replace(group(0), rollouts=tuple(rollouts))]
    raise AssertionError("the updates came after the engine had sampled")


def accumulated(step, groups):
    result = step.accumulate(batch_of(groups, OBJECTIVE, producing=VERSIONS, token_budget=2048))
    step.passes.policy.discard_gradient()
    return result


def test_old_logprobs_equal_the_sampled_logprobs_if_the_engine_recomputes_its_kv_cache_at_updates(step):
    result = accumulated(step, in_flight(step, OnUpdate.RECOMPUTE_KV, samples=4))
    tokens = sampled_tokens(result.batch.micro_batches, [loss.predictions for loss in result.first.losses])
    assert tokens is not None and tokens.old_logprobs is not None
    assert np.bincount(tokens.versions, minlength=VERSIONS).min() > 0
    assert np.abs(tokens.old_logprobs - tokens.behavior_logprobs).max() <= TOLERANCE
    metrics = figures(tokens, held_version=VERSIONS - 1, cuts={})
    causes = [name.split("_")[2] for name in metrics if name.startswith("old_mismatch") and name.endswith("_max")]
    assert {"staleness", "numerics"} <= {*causes}
    assert all(metrics[f"old_mismatch_{cause}_max"] <= TOLERANCE for cause in causes)
    assert metrics["mismatch_staleness_max"] > 1000 * TOLERANCE, "the versions must differ, or it is not tried"
    assert metrics["mismatch_numerics_max"] <= TOLERANCE


def test_kv_cache_written_by_older_weights_changes_only_logprobs_sampled_after_an_update(step):
    # Only one sample per prompt: a second one would read the cache of the prompt, which older weights wrote.
    result = accumulated(step, in_flight(step, OnUpdate.CONTINUE, samples=1))
    tokens = sampled_tokens(result.batch.micro_batches, [loss.predictions for loss in result.first.losses])
    assert tokens is not None and tokens.old_logprobs is not None
    difference = np.abs(tokens.old_logprobs - tokens.behavior_logprobs)
    updated = tokens.versions != tokens.turn_versions
    assert difference[~updated].max() <= TOLERANCE
    assert difference[updated].max() > 10 * TOLERANCE
