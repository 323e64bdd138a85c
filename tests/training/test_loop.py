"""The training loop with a real trainer and checkpoint store; the test plays controller, actors and engines."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TypeVar, final

import numpy as np
import pytest

from inference_contract.weights import OnUpdate
from pipelinerl.enums import NoSignal
from pipelinerl.errors import DeadlineError, DivergedError, FencedError, UpdateError
from pipelinerl.messages import (
    DIRECTIVES,
    REPORTS,
    ROLLOUTS,
    SKIPS_THAT_END,
    CanaryChecked,
    Checkpointed,
    OrdersEnded,
    Published,
    StepDone,
    StepSkipped,
    TrainerKnobs,
    TrainerLeaving,
    TrainerReady,
    TrainerStopped,
    decode_report,
    encode,
)
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.samples import SampleLog, read_samples
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import START
from pipelinerl.training import loop as loop_module, publishing
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.canary_check import CanaryFindings, Depth
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.loop import LoopSettings, TrainingLoop, training_loop
from pipelinerl.training.packing import WeightedRollout, pack
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step import Step
from pipelinerl.training.step_samples import StepSamples
from pipelinerl.types import ProblemSummary
from pipelinerl.weights.publisher import PublishReport
from tests.fakes.directives import directive
from tests.fakes.rollouts import group, rollout
from tests.patience import PATIENCE_S, SOON_S
from trainer_contract.types import TrainerSpec

DEADLINE_S = PATIENCE_S
ENGINE = "http://engine-0"
R = TypeVar("R")


@final
class Engines:
    """A fake publisher and canary checker that can hold back publications (`gate`) and checks (`doubt`)."""

    def __init__(self):
        self.taken = []
        self.proven = []
        self.gate, self.doubt = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.doubt.set()
        self.wrong, self.silent = set(), set()
        self.broken = ""
        self.closed = False

    async def publish(self, publication):
        await self.gate.wait()
        if self.broken:
            raise UpdateError(self.broken)
        assert [name for name, _ in publication.weights()] == ["bigram.logits"]
        self.taken.append((publication.epoch, publication.version, publication.membership))
        return PublishReport(
            version=publication.version,
            epoch=publication.epoch,
            digest="",
            send_s=0.0,
            total_s=0.0,
            pauses_s=dict.fromkeys(publication.engines, 0.001),
            failed={},
        )

    async def check(self, urls, published, forward, depth):
        """Accept all engines, and record the trainer's log-probs of two tokens at the time of the check.

        A check after an update rejects the engines that serve a version of `wrong`. Those in `silent` do not answer.
        """
        if depth is not Depth.JOINING:
            failed = {url: "no answer" for url in urls if url in self.silent}
            answered = [url for url in urls if url not in failed]
            bad = {url: "its log-probs are off" for url in answered if published.version in self.wrong}
            good = {url: 0.0 for url in answered if url not in bad}
            return CanaryFindings(worst=good, mismatched=bad, failed=failed)
        await self.doubt.wait()
        self.proven.append((published.version, (await forward(two_tokens())).tolist()))
        return CanaryFindings(worst=dict.fromkeys(urls, 0.0))

    async def close(self):
        self.closed = True


def two_tokens():
    """Return a micro-batch with the two sampled tokens that every rollout in this module contains."""
    weighted = WeightedRollout(rollout=rollout(), advantages=np.zeros(2), token_weight=1.0)
    (packed,) = pack([weighted], token_budget=8)
    return packed.micro_batch


def poisoned(index):
    """Return a group whose second rollout has NaN log-probs."""
    made = group(index)
    return replace(made, rollouts=(made.rollouts[0], rollout(reward=1.0, logprob=math.nan)))


@dataclass
class Surroundings:
    """A running training loop with its stream, checkpoint store, trainer and engines."""

    stream: MemoryStream
    engines: Engines
    store: CheckpointStore
    loop: TrainingLoop
    trainer: BigramTrainer
    steps: list[int] = field(default_factory=list)
    task: asyncio.Task[int] | None = None

    async def reports(self, kind):
        entries = await self.stream.read({REPORTS: START}, count=1000, block_s=0)
        decoded = [decode_report(entry.payload) for entry in entries]
        return [report for report in decoded if isinstance(report, kind)]

    async def wait_for(self, kind, number=1):
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            while len(received := await self.reports(kind)) < number:
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.005)
        return received[number - 1]

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def say(self, answers, **fields):
        rate, rollouts = fields.pop("learning_rate", 0.1), fields.pop("rollouts_per_step", 4)
        knobs = TrainerKnobs(k=4, learning_rate=rate, rollouts_per_step=rollouts)
        order = directive(answers, **{"knobs": knobs, "membership": 1} | fields)
        await self.stream.append(DIRECTIVES, [encode(order)])

    async def begin(self, **fields):
        ready = await self.wait_for(TrainerReady)
        await self.say(ready.report_id, **fields)

    async def roll_out(self, *indices, version=0, poison=False, rewards=(0.0, 1.0), engines=()):
        """Append groups of two rollouts to an actor's stream; with `poison`, one rollout has NaN log-probs."""
        made = [poisoned(index) if poison else group(index, rewards, version=version) for index in indices]
        payloads = [encode_group(replace(each, engines=engines)) for each in made]
        await self.stream.append(ROLLOUTS + "a", payloads, first_id=1 + min(indices))


@asynccontextmanager
async def room(
    tmp_path,
    *,
    deadline_s=DEADLINE_S,
    warmup_steps=0,
    restored=None,
    no_signal=NoSignal.TRAIN,
    overdue_s=None,
    objective="grpo",
    samples=None,
    use_cores=lambda cores: None,
):
    model = tmp_path / "model"
    BigramModel.random(7, seed=0).save(model)
    stream, engines, trainer = MemoryStream(), Engines(), BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model))
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model)
    steps = []
    loop = training_loop(
        LoopSettings(
            no_signal=no_signal,
            deadline_s=deadline_s,
            on_update=OnUpdate.CONTINUE,
            vocab_size=7,
            overdue_s=overdue_s,
            schedule=LearningRateSchedule(warmup_steps=warmup_steps, steps=9, shape="constant", final_fraction=0.0),
        ),
        step=Step(rules=BatchRules(token_budget=64), passes=ForwardPasses(policy=trainer)),
        objective=resolve(objective, max_tokens=8),
        stream=stream,
        publisher=engines,
        check_canary=lambda *given: engines.check(*given),
        checkpoints=store,
        restored=restored,
        at=steps.append,
        samples=samples,
        use_cores=use_cores,
    )
    made = Surroundings(stream, engines, store, loop, trainer, steps)
    made.task = asyncio.create_task(loop.run())
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await loop.close()
        assert engines.closed


async def ended(made):
    assert made.task is not None
    return await asyncio.wait_for(made.task, DEADLINE_S)


async def test_step_changes_the_weights_only_after_pending_canary_checks(tmp_path):
    async with room(tmp_path) as made:
        made.engines.doubt.clear()
        before = made.trainer.forward([two_tokens()])[0].tolist()
        await made.begin(publish_to=[ENGINE, "http://engine-1"], to_verify=[ENGINE])
        await made.wait_for(Published)
        await made.roll_out(0, 1)
        await made.until(lambda: made.loop.batcher.ledger.counts[GroupOutcome.TRAINED] > 0)
        assert (made.trainer.model_version, made.steps) == (0, []), "the step waits for the proof"
        made.engines.doubt.set()
        proved = await made.wait_for(CanaryChecked)
        assert (proved.model_version, proved.membership, proved.worst) == (0, 1, {ENGINE: 0.0})
        await made.wait_for(StepDone)
        assert made.engines.proven == [(0, before)]
        assert made.trainer.forward([two_tokens()])[0].tolist() != before


async def test_groups_that_an_engine_sampled_with_wrong_weights_do_not_train_and_are_sampled_again(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        made.engines.wrong = {0}
        await made.say("again-e1-0", publish_to=[ENGINE])
        checked = await made.wait_for(CanaryChecked)
        assert checked.mismatched == {ENGINE: "its log-probs are off"} and checked.worst == {}
        await made.roll_out(0, 1)
        assert (await made.wait_for(OrdersEnded)).again == [0, 1] and made.trainer.model_version == 0
        await made.roll_out(2, engines=(ENGINE,))
        assert (await made.wait_for(OrdersEnded, 2)).again == [2], "later groups of these weights are sampled again"
        await made.roll_out(3, engines=("http://engine-1",))
        assert made.loop.batcher.doubted == {(ENGINE, 1, 0)}
        again = [replace(group(index), group_id=f"again-{index}") for index in (2,)]
        await made.stream.append(ROLLOUTS + "a", [encode_group(each) for each in again], first_id=9)
        assert (await made.wait_for(StepDone)).orders == [2, 3], "healthy engines sampled them"


async def test_groups_of_an_engine_that_does_not_answer_the_canary_train_only_once_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_AGAIN_S", 0.0)
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE, "http://engine-1"])
        await made.roll_out(0, engines=(ENGINE,))
        await made.roll_out(1, engines=("http://engine-1",))
        await made.until(lambda: made.loop.batcher.waiting == [0, 1] and made.loop.publishing._silent)
        await made.roll_out(2, engines=("http://engine-1",))
        assert (await made.wait_for(StepDone)).orders == [1, 2]
        made.engines.silent = set()
        await made.say("e1-step-1", publish_to=[ENGINE, "http://engine-1"])
        await made.wait_for(Published, 2)
        assert (await made.wait_for(OrdersEnded)).again == [0], "it got other weights before it proved these"


async def test_step_waits_for_the_only_engines_proof_and_takes_its_groups_then(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_AGAIN_S", 0.0)
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, engines=(ENGINE,))
        await made.until(lambda: made.loop.batcher.waiting == [0, 1] and made.loop.publishing._silent)
        made.engines.silent = set()
        assert (await made.wait_for(StepDone)).orders == [0, 1]
        assert not await made.reports(OrdersEnded) and not await made.reports(CanaryChecked)


async def test_groups_without_a_proof_are_sampled_again_after_a_deadline_and_the_engine_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_PROOF_S", 0.0)
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE])
        assert (await made.wait_for(CanaryChecked)).failed == {ENGINE: "no answer"}
        await made.roll_out(0, 1, engines=(ENGINE,))
        assert (await made.wait_for(OrdersEnded)).again == [0, 1] and made.trainer.model_version == 0


async def test_engine_that_owes_a_proof_of_weights_that_the_trainer_has_left_is_lost_after_the_deadline(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(publishing, "_AGAIN_S", 0.0)
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE, "http://engine-1"])
        await made.roll_out(0, engines=(ENGINE,))
        await made.roll_out(1, 2, engines=("http://engine-1",))
        await made.wait_for(StepDone)
        monkeypatch.setattr(publishing, "_PROOF_S", 0.0)
        await made.say("e1-step-1")
        assert (await made.wait_for(CanaryChecked)).failed == {ENGINE: "no answer before the trainer's next step"}
        assert (await made.wait_for(OrdersEnded)).again == [0]


async def test_groups_of_an_engine_that_left_before_its_proof_are_sampled_again(tmp_path):
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE, "http://engine-1"])
        await made.wait_for(Published)
        await made.say("again-e1-0", publish_to=["http://engine-1"])
        await made.wait_for(Published, 2)
        await made.roll_out(0, engines=(ENGINE,))
        assert (await made.wait_for(OrdersEnded)).again == [0]
        await made.roll_out(1, 2, engines=("http://engine-1",))
        assert (await made.wait_for(StepDone)).orders == [1, 2]


async def test_failure_of_all_engines_points_to_the_trainer_and_the_transport(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        made.engines.wrong = {0}
        await made.say("again-e1-0", publish_to=[ENGINE, "http://engine-1"])
        for reason in (await made.wait_for(CanaryChecked)).mismatched.values():
            assert reason.startswith("all 2 checked engines fail, so look first at the trainer, weights.transport")


async def test_rollout_groups_whose_requests_the_controller_ended_as_stale_are_dropped(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.say("reload-e1-0-m1", stale=[0, 3], failed=[4])
        progress = await made.wait_for(OrdersEnded)
        assert (progress.consumed.stale, progress.consumed.failed, progress.consumed.beyond) == (2, 1, [3, 4])
        await made.roll_out(0, 1, 2, 3)
        done = await made.wait_for(StepDone)
        assert (done.orders, done.consumed.trained, done.consumed.stale, done.consumed.frontier) == ([1, 2], 2, 2, 5)


async def test_step_reports_trained_and_filtered_groups_by_domain_and_logs_samples_of_both(tmp_path):
    log = SampleLog(tmp_path / "samples", "training", max_bytes=2**20)
    samples = StepSamples(log, str, seed=0, groups_per_step=1)
    async with room(tmp_path, no_signal=NoSignal.FILTER, samples=samples) as made:
        await made.begin()
        await made.roll_out(0, 1, rewards=(1.0, 1.0))
        ended_untrained = await made.wait_for(OrdersEnded)
        assert ended_untrained.consumed.trained == 0
        await made.roll_out(2, 3)
        done = await made.wait_for(StepDone)
        figures = done.by_domain["test"]
        assert (figures["groups"], figures["stale_groups"], figures["rollouts"]) == (4, 0, 8)
        assert (figures["all_right"], figures["accuracy"]) == (0.5, 0.75) and done.by_tag == {}
    log.close()
    trained, filtered = read_samples(tmp_path)
    assert trained.step == 1 and filtered.filtered == {"no signal": 2} and filtered.group_id == group(1).group_id


async def test_solved_problems_are_reported_once_and_unreported_ones_are_kept_in_checkpoints(tmp_path):
    async def solve(made, *indices):
        groups = [replace(group(i, (1.0, 1.0)), problem=ProblemSummary(f"p{i}")) for i in indices]
        await made.stream.append(ROLLOUTS + "a", [encode_group(each) for each in groups], first_id=1 + indices[0])

    async with room(tmp_path, no_signal=NoSignal.FILTER) as made:
        await made.begin()
        await solve(made, 0, 1)
        await made.roll_out(2, 3)
        first = await made.wait_for(StepDone)
        assert first.solved == {"test": [(0, "p0"), (1, "p1")]}
        await solve(made, 4)
        await made.say(first.report_id, checkpoint=True, controller_state={})
        await made.wait_for(Checkpointed)
        latest = made.store.latest()
        assert latest is not None
        await made.roll_out(5, 6)
        assert (await made.wait_for(StepDone, 2)).solved == {"test": [(4, "p4")]}
    restored = latest[1]
    assert restored.solved == {"test": [[4, "p4"]]}
    async with room(tmp_path / "again", restored=restored) as made:
        assert (await made.wait_for(TrainerReady)).solved == {"test": [(4, "p4")]}


async def test_step_with_enough_rollouts_waits_for_a_group_that_would_be_too_old_for_later_steps(tmp_path):
    async with room(tmp_path, overdue_s=DEADLINE_S) as made:
        due = {"fresh_until": [(0, 1)], "issued": 3}
        await made.begin(**due)
        await made.roll_out(0, 1)
        await made.until(lambda: len(made.loop.batcher.waiting) == 2)
        await asyncio.sleep(0.1)
        assert not await made.reports(StepDone), "order 2 could train no other step"
        await made.say("ended-e1-2", failed=[2], **due)
        assert (await made.wait_for(StepDone)).orders == [0, 1]


async def test_trainer_reports_each_step_and_waits_for_the_controllers_answer_before_the_next(tmp_path):
    async with room(tmp_path) as made:
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, 2, 3)
        done = await made.wait_for(StepDone)
        assert (done.report_id, done.model_version, done.consumed.trained) == ("e1-step-1", 1, 2)
        assert done.stats["rollouts"] == 4.0 and done.stats["grad_norm"] > 0
        await asyncio.sleep(0.1)
        assert made.trainer.model_version == 1, "the second batch is ready, but the controller has not answered"
        await made.say("e1-step-1", publish_to=[ENGINE], membership=2)
        assert (await made.wait_for(StepDone, 2)).consumed.frontier == 4
        await made.say("e1-step-2", stop=True)
        assert await ended(made) == 2
        assert (await made.wait_for(TrainerStopped)).model_version == 2
        assert (made.engines.taken, made.steps) == ([(1, 0, 1), (1, 1, 2)], [1, 2])


async def test_preempted_trainer_that_was_waiting_for_rollouts_saves_its_state(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1)
        done = await made.wait_for(StepDone)
        await made.say(done.report_id)
        made.loop.leave()
        leaving = await made.wait_for(TrainerLeaving)
        assert (leaving.model_version, leaving.consumed.trained) == (1, 2)
        await made.say(leaving.report_id, stop=True, checkpoint=True, controller_state={"a": 1})
        assert await ended(made) == 1
        latest = made.store.latest()
        assert latest is not None and (latest[1].model_version, latest[1].controller) == (1, {"a": 1})
        assert (await made.wait_for(TrainerStopped)).left


async def test_trainer_saves_one_checkpoint_even_if_the_controller_sends_two_stop_directives(tmp_path):
    """One stop directive comes unsolicited while the trainer waits for an answer, the other is the answer itself."""
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1)
        done = await made.wait_for(StepDone)
        await made.say("suspend-e1-0", stop=True, checkpoint=True, controller_state={"a": 1})
        await made.say(done.report_id, stop=True, checkpoint=True, controller_state={"a": 2})
        assert await ended(made) == 1
        assert [saved.model_version for saved in await made.reports(Checkpointed)] == [1]


async def test_preempted_trainer_finishes_the_current_step_before_it_saves_its_state(tmp_path):
    """Groups that arrive for the next step stay in the stream."""
    async with room(tmp_path) as made:
        made.engines.gate.clear()
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, 2, 3)
        async with asyncio.timeout(DEADLINE_S):
            while not made.loop.batcher.ledger.counts[GroupOutcome.TRAINED]:
                await asyncio.sleep(0.005)
        made.loop.leave()
        made.engines.gate.set()
        done = await made.wait_for(StepDone)
        await made.say(done.report_id)
        leaving = await made.wait_for(TrainerLeaving)
        assert (leaving.model_version, leaving.consumed.trained) == (1, 2)


async def test_step_changes_the_weights_only_after_the_publication_in_progress_has_ended(tmp_path):
    async with room(tmp_path) as made:
        made.engines.gate.clear()
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1)
        await asyncio.sleep(0.2)
        assert made.trainer.model_version == 0
        made.engines.gate.set()
        await made.wait_for(StepDone)
        kinds = [type(report) for report in await made.reports(object)]
        assert kinds.index(Published) < kinds.index(StepDone)
        assert made.engines.taken == [(1, 0, 1)]


async def test_failed_publication_is_reported_and_training_continues(tmp_path):
    async with room(tmp_path) as made:
        made.engines.broken = "engine-0 left the group"
        await made.begin(publish_to=[ENGINE, "http://engine-1"])
        await made.roll_out(0, 1)
        failed = await made.wait_for(Published)
        assert failed.failed == dict.fromkeys([ENGINE, "http://engine-1"], "engine-0 left the group")
        assert (failed.pauses_s, failed.model_version, failed.membership) == ({}, 0, 1)
        assert (await made.wait_for(StepDone)).model_version == 1


@pytest.mark.parametrize("where", ["publish", "check"])
async def test_trainer_that_waits_for_rollouts_ends_if_a_publication_crashes(tmp_path, monkeypatch, where):
    async def dies(*_):
        raise RuntimeError("a fault of ours")

    async with room(tmp_path) as made:
        monkeypatch.setattr(Engines, where, dies)
        await made.begin(publish_to=[ENGINE], to_verify=[ENGINE])
        assert made.task is not None
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(made.task, SOON_S)


async def test_checkpoint_contains_the_state_to_resume_from(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1, 2)
        await made.wait_for(StepDone)
        await made.say("e1-step-1", checkpoint=True, controller_state={"epoch": 1, "knobs": {}}, failed=[7])
        written = await made.wait_for(Checkpointed)
        latest = made.store.latest()
        assert latest is not None and str(latest[0]) == written.path
        saved = latest[1]
        assert (saved.model_version, saved.epoch, saved.controller) == (1, 1, {"epoch": 1, "knobs": {}})
        assert saved.ledger == {
            "frontier": 2,
            "beyond": [7],
            "counts": {"trained": 2, "filtered": 0, "stale": 0, "failed": 1},
        }
        assert saved.offsets[ROLLOUTS + "a"] == "2-0", "group 2 waits and is read again"
        restored = BigramTrainer()
        restored.init_worker(TrainerSpec(model_path=tmp_path / "model", restore_from=latest[0] / "trainer"))
        assert restored.model_version == 1


def state(**fields):
    return TrainingState(model_version=0, offsets={}, ledger=ConsumedLedger().to_record(), controller={}, **fields)


async def test_checkpoint_records_the_version_at_which_each_earlier_trainer_epoch_began(tmp_path):
    async with room(tmp_path, restored=state(epoch=2, epochs=[[1, 0], [2, 0]])) as made:
        await made.begin(epoch=4, checkpoint=True, controller_state={})
        await made.wait_for(Checkpointed)
        latest = made.store.latest()
        assert latest is not None and latest[1].epochs == [[1, 0], [2, 0], [4, 0]]


async def test_checkpoint_contains_the_reward_baselines_of_roles(tmp_path):
    async with room(tmp_path, restored=state(epoch=1, baselines={"test": 2.0}), objective="rae") as made:
        await made.begin(epoch=2)
        await made.roll_out(0, 1)
        await made.wait_for(StepDone)
        await made.say("e2-step-1", epoch=2, checkpoint=True, controller_state={})
        await made.wait_for(Checkpointed)
        latest = made.store.latest()
        expected = 2.0
        for reward in (0.0, 1.0, 0.0, 1.0):  # the rewards of the four rollouts in groups 0 and 1
            expected = 0.95 * expected + 0.05 * reward
        assert latest is not None and latest[1].baselines == {"test": pytest.approx(expected)}


async def test_directive_that_the_controller_sends_twice_is_applied_once(tmp_path):
    async with room(tmp_path) as made:
        await made.begin(publish_to=[ENGINE])
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1)
        await made.wait_for(StepDone)
        for _ in range(2):
            await made.say("e1-step-1", publish_to=[ENGINE], failed=[5])
        await made.roll_out(2, 3)
        done = await made.wait_for(StepDone, 2)
        assert (done.consumed.failed, done.consumed.trained) == (1, 4)
        assert made.engines.taken == [(1, 0, 1), (1, 1, 1)]


async def test_trainer_publishes_to_engines_that_join_between_steps(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.say("reload-e1-0-m2", publish_to=[ENGINE], membership=2)
        assert (await made.wait_for(Published)).pauses_s == {ENGINE: 0.001}
        assert made.engines.taken == [(1, 0, 2)]


async def test_trainer_that_waits_for_rollouts_obeys_a_stop_directive(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.say("stop-e1", stop=True, publish_to=[ENGINE])
        assert await ended(made) == 0
        assert made.engines.taken == [(1, 0, 1)], "the last weights are served"
        assert (await made.wait_for(TrainerStopped)).epoch == 1


async def test_step_with_nan_logprobs_is_skipped_and_training_continues(tmp_path):
    async with room(tmp_path) as made:
        before = [weight.tobytes() for _, weight in made.trainer.gather_weights()]
        await made.begin()
        await made.roll_out(0)
        await made.roll_out(1, poison=True)
        skipped = await made.wait_for(StepSkipped)
        assert (skipped.what, skipped.groups, skipped.in_a_row) == ("behavior_logprobs", [1], 1)
        assert (skipped.model_version, made.trainer.model_version) == (0, 0)
        assert [weight.tobytes() for _, weight in made.trainer.gather_weights()] == before
        account = skipped.consumed
        assert (account.trained, account.filtered, account.frontier) == (0, 2, 2), "read, and not trained"
        await made.roll_out(2, 3)
        await asyncio.sleep(0.1)
        assert not await made.reports(StepDone), "the next batch is ready, but the controller has not answered"
        await made.say(skipped.report_id)
        done = await made.wait_for(StepDone)
        assert (done.model_version, done.consumed.trained, done.consumed.filtered) == (1, 2, 2)
        await made.say("e1-step-1")
        await made.roll_out(4)
        await made.roll_out(5, poison=True)
        assert (await made.wait_for(StepSkipped, 2)).in_a_row == 1, "a step that was applied lies between"


async def test_skipped_step_is_reported_only_after_the_publication_in_progress_has_ended(tmp_path):
    async with room(tmp_path) as made:
        made.engines.gate.clear()
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, poison=True)
        await asyncio.sleep(0.2)
        assert not await made.reports(StepSkipped)
        made.engines.gate.set()
        await made.wait_for(StepSkipped)
        kinds = [type(report) for report in await made.reports(object)]
        assert kinds.index(Published) < kinds.index(StepSkipped)


async def test_trainer_saves_its_state_and_exits_with_an_error_after_three_skipped_steps_in_a_row(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1, 2, 3, 4, 5, 6, 7, poison=True)
        for number in (1, 2):
            skipped = await made.wait_for(StepSkipped, number)
            await made.say(skipped.report_id)
        skipped = await made.wait_for(StepSkipped, 3)
        assert (skipped.in_a_row, skipped.groups) == (SKIPS_THAT_END, [4, 5])
        await made.say(skipped.report_id, stop=True, checkpoint=True, publish_to=[ENGINE], controller_state={"a": 1})
        sentence = "step 1 was skipped 3 times in a row, the last time since behavior_logprobs of groups 4, 5 was not"
        with pytest.raises(DivergedError, match=sentence):
            await ended(made)
        latest = made.store.latest()
        assert latest is not None
        assert (latest[1].model_version, latest[1].controller) == (0, {"a": 1})
        assert latest[1].ledger["counts"] == {"trained": 0, "filtered": 6, "stale": 0, "failed": 0}
        assert made.engines.taken == [(1, 0, 1)]
        assert not await made.reports(TrainerStopped), "the run has not come to its end"


async def test_trainers_first_report_names_the_epoch_that_last_claimed_the_checkpoint_store(tmp_path):
    """Otherwise a restarted controller could assign an epoch that may no longer write checkpoints."""
    CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=tmp_path).claim(4)
    async with room(tmp_path) as it:
        assert (await it.wait_for(TrainerReady)).claimed == 4


@pytest.mark.parametrize("answers", ["ready-other", "reload-e2-0-m3", "stop-e2", "e2-step-1"])
@pytest.mark.parametrize("while_it", ["collects", "waits for an answer"])
async def test_directive_for_a_later_trainer_epoch_ends_this_trainer_with_a_fenced_error(tmp_path, answers, while_it):
    """After such a directive, the trainer neither publishes weights nor trains."""
    async with room(tmp_path) as made:
        await made.begin()
        if while_it == "waits for an answer":
            await made.roll_out(0, 1)
            await made.wait_for(StepDone)
        await made.say(answers, epoch=2, publish_to=[ENGINE], stop=answers.startswith("stop"))
        with pytest.raises(FencedError, match="epoch 2 has taken over from epoch 1"):
            await ended(made)
        assert made.engines.taken == []


async def test_trainer_ignores_directives_for_an_earlier_trainer_epoch(tmp_path):
    async with room(tmp_path) as made:
        await made.begin(epoch=3)
        await made.say("stop-e2", epoch=2, stop=True)
        await made.roll_out(0, 1)
        assert (await made.wait_for(StepDone)).epoch == 3


@pytest.mark.parametrize("culprit", ["controller", "actors"])
async def test_error_of_a_trainer_that_waited_too_long_blames_the_actors_or_the_controller(tmp_path, culprit):
    async with room(tmp_path, deadline_s=0.5) as made:
        if culprit == "actors":
            await made.begin()
            await made.roll_out(0)
            sentence = "step 1 needs 4 rollouts and has 1 groups, and nothing arrived for 0 s; see what the controller"
        else:
            sentence = "the trainer waited 0 s for the controller to answer ready-.*; is the controller running"
        with pytest.raises(DeadlineError, match=sentence):
            await ended(made)


def taken_in(loop):
    """Return what changes when something arrives: waiting groups, ledger counts and the current directive."""
    return len(loop.batcher.waiting), dict(loop.batcher.ledger.counts), loop.link.current


@pytest.mark.parametrize("by", ["groups", "directives", "groups that teach nothing"])
async def test_trainer_keeps_waiting_for_rollouts_past_its_deadline_as_long_as_messages_arrive(
    tmp_path, monkeypatch, by
):
    """The clock advances by almost a deadline before each arrival, so that the whole wait is several deadlines long."""
    ahead_s = 0.0
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    async with room(tmp_path, no_signal=NoSignal.FILTER) as made:
        await made.roll_out(0)
        await made.begin(rollouts_per_step=8)
        await made.until(lambda: len(made.loop.batcher.waiting) == 1)
        for number in (1, 2, 3):
            before = taken_in(made.loop)
            ahead_s += 0.7 * DEADLINE_S
            if by == "groups":
                await made.roll_out(number)
            elif by == "groups that teach nothing":
                await made.roll_out(number, rewards=(1.0, 1.0))
            else:
                await made.say(f"knobs-e1-{number}", rollouts_per_step=8)
            await made.until(lambda before=before: taken_in(made.loop) != before)
        await made.roll_out(4, 5, 6, 7)
        assert (await made.wait_for(StepDone)).consumed.trained == 4


async def test_trainer_computes_on_the_cores_of_its_directives_on_its_own_thread(tmp_path):
    used = []
    async with room(tmp_path, use_cores=lambda cores: used.append((cores, threading.current_thread().name))) as made:
        await made.begin()
        for step, cores in enumerate(([], [0, 1], []), 1):
            await made.roll_out(2 * step - 2, 2 * step - 1)
            await made.wait_for(StepDone, step)
            await made.say(f"e1-step-{step}", cores=cores)
        await made.say("knobs-1", stop=True)
        await ended(made)
    assert [cores for cores, _ in used] == [[], [0, 1], []]
    assert {name.partition("_")[0] for _, name in used} == {"trainer"}


async def test_learning_rate_of_a_step_is_the_knobs_value_times_the_schedules_factor(tmp_path):
    async with room(tmp_path, warmup_steps=4) as made:
        await made.begin(learning_rate=0.1)
        await made.roll_out(0, 1)
        assert (await made.wait_for(StepDone)).stats["learning_rate"] == pytest.approx(0.1 / 4)
        await made.say("e1-step-1", learning_rate=0.8)
        await made.roll_out(2, 3)
        assert (await made.wait_for(StepDone, 2)).stats["learning_rate"] == pytest.approx(0.8 * 2 / 4)
