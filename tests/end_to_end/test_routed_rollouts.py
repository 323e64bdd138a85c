"""Routed experts go from a mixture-of-experts engine through actor, stream and packing into a training step."""

import asyncio
from dataclasses import replace
from typing import final

import numpy as np

from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.http.pool import PartialAnswer
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.enums import NoSignal, RoutingReplay
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.presets import resolve
from pipelinerl.staleness import StalenessBounds
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import ConsumedLedger, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.types import Answered, Outcome, Verdict
from pipelinerl.verifiers.verifier import PerAnswerVerifier
from tests.actor.test_actor import NAME, Watched, order, until
from tests.fakes.batches import batch_of, step_on
from tests.fakes.engine_options import engine_options
from tests.fakes.mixtures import CONTEXT, ROUTING, save_mixture
from trainer_contract.types import Device, TrainerSpec, WeightDType

GROUPS = 2
OBJECTIVE = resolve({"preset": "decoupled_ppo"})


@final
class InParts:
    """A `Sampler` that calls an engine in this process, streams its answers, and joins the chunks."""

    def __init__(self, engine):
        self._engine = engine

    async def complete(self, request, *, begun=lambda: None, engine="", near=""):
        begun()
        answer = PartialAnswer(request, interval_s=0.001)
        async for chunk in self._engine.stream(answer.rest()):
            answer.take(chunk, url="here")
        return Answered(answer.completion(), "here")


@final
class LikesLow:
    """A verifier that rewards the fraction of lower-case letters, so that answers of a random model rarely tie."""

    async def verify(self, problem, completion_text):
        share = sum(each.islower() for each in completion_text) / max(len(completion_text), 1)
        return Verdict(outcome=Outcome.PARTIAL if share else Outcome.WRONG, reward=share)


async def sampled(path):
    """Let an actor sample groups with the model in `path`; return the groups in the rollout stream."""
    one_core = {"device": Device.CPU, "threads": 1, "dtype": WeightDType.BFLOAT16}
    options = engine_options(model_path=path, slots=5, context_length=CONTEXT, **one_core)
    engine = BatchingEngine(options, load=lambda: load_runner(options), tokenizer=ChatTokenizer.load(path))
    await engine.start()
    watched, settings = Watched(), ActorSettings(name=NAME, groups_in_flight=4, heartbeat_s=0.02, block_s=0.02)
    maker = SingleTurn(
        InParts(engine), lambda _: PerAnswerVerifier(LikesLow()), attempts=1, routing_replay=RoutingReplay.ROLLOUT
    )
    actor = Actor(settings, stream=watched.stream, maker_of=lambda _: maker)
    working = asyncio.create_task(actor.run())
    try:
        await watched.order(*(order(index, samples=3) for index in range(GROUPS)))

        async def all_of_them():
            rollout_groups = await watched.groups()
            return rollout_groups if len(rollout_groups) == GROUPS else []

        return await until(all_of_them)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await engine.close()


async def test_training_step_uses_the_experts_that_sampled_the_tokens(tmp_path):
    groups = await sampled(save_mixture(tmp_path))
    batcher = Batcher(ledger=ConsumedLedger(), lineage=Lineage(0, 0), no_signal=NoSignal.TRAIN, routing=ROUTING)
    for group in groups:
        batcher.offer(group)
    taken = batcher.take(StepBudget(rollouts=3 * GROUPS), producing=1, bounds=StalenessBounds(1, 2))
    assert taken is not None and len(taken) == GROUPS
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=tmp_path, device=Device.CPU))
    batch = batch_of(taken, OBJECTIVE, token_budget=64)
    assert all(each.routed_experts is not None for each in batch.micro_batches)
    for each in batch.micro_batches:
        (replayed,), (free,) = trainer.forward([each]), trainer.forward([replace(each, routed_experts=None)])
        apart = np.abs(replayed - each.behavior_logprobs)[each.loss_mask]
        assert apart.max() < 0.2, "what is left is bf16's rounding"
        assert apart.mean() <= np.abs(free - each.behavior_logprobs)[each.loss_mask].mean() + 0.01
    step = step_on(ForwardPasses(policy=trainer))
    applied = step.apply(step.accumulate(batch), learning_rates=[1e-3])
    assert trainer.model_version == 1 and applied is not None
    trainer.close()
