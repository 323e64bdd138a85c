"""The training loop with a real trainer and checkpoint store; the test plays controller, actors and engines."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

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
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import START
from pipelinerl.training import loop as loop_module, publishing
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.canary_check import CanaryFindings, Depth
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.loop import LoopSettings, training_loop
from pipelinerl.training.packing import alone
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step import Step
from pipelinerl.training.step_samples import StepSamples
from pipelinerl.types import ProblemSummary
from pipelinerl.weights.publisher import PublishReport
from tests.fakes.batches import bigram
from tests.fakes.directives import directive
from tests.fakes.rollouts import group, rollout
from tests.patience import PATIENCE_S, SOON_S
from trainer_contract.types import TrainerSpec

ENGINE, OTHER = "http://engine-0", "http://engine-1"
TOKENS = alone([rollout()])


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
        pauses = dict.fromkeys(publication.engines, 0.001)
        sent = {"send_s": 0.0, "total_s": 0.0, "pauses_s": pauses, "failed": {}}
        return PublishReport(version=publication.version, epoch=publication.epoch, digest="", **sent)

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
        self.proven.append((published.version, (await forward(TOKENS)).tolist()))
        return CanaryFindings(worst=dict.fromkeys(urls, 0.0))

    async def close(self):
        self.closed = True


class Room:
    """A running training loop with its stream, checkpoint store, trainer and engines."""

    def __init__(self, tmp_path, *, warmup_steps=0, objective="grpo", settings=None, **rest):
        model = tmp_path / "model"
        self.stream, self.engines, self.steps, self.path = MemoryStream(), Engines(), [], tmp_path
        self.trainer = bigram(model, seed=0)
        self.store = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model)
        schedule = LearningRateSchedule(warmup_steps=warmup_steps, steps=9, shape="constant", final_fraction=0.0)
        given = {"no_signal": NoSignal.TRAIN, "deadline_s": PATIENCE_S, "on_update": OnUpdate.CONTINUE}
        self.loop = training_loop(
            LoopSettings(**given | (settings or {}), vocab_size=7, schedule=schedule),
            step=Step(rules=BatchRules(token_budget=64), passes=ForwardPasses(policy=self.trainer)),
            objective=resolve(objective, max_tokens=8),
            stream=self.stream,
            publisher=self.engines,
            check_canary=lambda *given: self.engines.check(*given),
            checkpoints=self.store,
            at=self.steps.append,
            **{"restored": None} | rest,
        )
        self.task = asyncio.create_task(self.loop.run())

    async def reports(self, kind=object):
        entries = await self.stream.read({REPORTS: START}, count=1000, block_s=0)
        decoded = [decode_report(entry.payload) for entry in entries]
        return [report for report in decoded if isinstance(report, kind)]

    async def wait_for(self, kind, number=1):
        async with asyncio.timeout(PATIENCE_S):
            while len(received := await self.reports(kind)) < number:
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.005)
        return received[number - 1]

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def ended(self, within_s=PATIENCE_S):
        return await asyncio.wait_for(self.task, within_s)

    async def say(self, answers, *, learning_rate=0.1, rollouts_per_step=4, **fields):
        knobs = TrainerKnobs(k=4, learning_rate=learning_rate, rollouts_per_step=rollouts_per_step)
        order = directive(answers, **{"knobs": knobs, "membership": 1} | fields)
        await self.stream.append(DIRECTIVES, [encode(order)])

    async def begin(self, **fields):
        await self.say((await self.wait_for(TrainerReady)).report_id, **fields)

    async def put(self, *groups):
        """Append groups to an actor's stream."""
        first = 1 + min(each.index for each in groups)
        await self.stream.append(ROLLOUTS + "a", [encode_group(each) for each in groups], first_id=first)

    async def roll_out(self, *indices, poison=False, rewards=(0.0, 1.0), engines=()):
        """Append groups of two rollouts; with `poison`, the second one has NaN log-probs."""
        made = [replace(group(index, rewards), engines=engines) for index in indices]
        if poison:
            bad = rollout(reward=1.0, logprob=math.nan)
            made = [replace(each, rollouts=(each.rollouts[0], bad)) for each in made]
        await self.put(*made)

    async def saved(self):
        """Wait for a checkpoint; return the state in the newest."""
        await self.wait_for(Checkpointed)
        return self.store.latest()[1]


@asynccontextmanager
async def room(tmp_path, **given):
    made = Room(tmp_path, **given)
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await made.loop.close()
        assert made.engines.closed


async def test_building_a_batch_counts_as_work_of_the_step_and_not_as_a_wait_for_rollouts(tmp_path, monkeypatch):
    def build(*given, **named):
        time.sleep(0.5)
        return real(*given, **named)

    real = loop_module.build
    monkeypatch.setattr(loop_module, "build", build)
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1, 2, 3)
        await made.wait_for(StepDone)
        await made.say("e1-step-1")
        stats = (await made.wait_for(StepDone, 2)).stats
        assert stats["step_s"] >= 0.5 > stats["wait_s"]


# --- proofs of engines ------------------------------------------------------------------------------------------------


async def test_step_changes_the_weights_only_after_pending_canary_checks(tmp_path):
    async with room(tmp_path) as made:
        made.engines.doubt.clear()
        before = made.trainer.forward([TOKENS])[0].tolist()
        await made.begin(publish_to=[ENGINE, OTHER], to_verify=[ENGINE])
        await made.wait_for(Published)
        await made.roll_out(0, 1)
        await made.until(lambda: made.loop.batcher.ledger.counts[GroupOutcome.TRAINED] > 0)
        assert (made.trainer.model_version, made.steps) == (0, []), "the step waits for the proof"
        made.engines.doubt.set()
        proved = await made.wait_for(CanaryChecked)
        assert (proved.model_version, proved.membership, proved.worst) == (0, 1, {ENGINE: 0.0})
        await made.wait_for(StepDone)
        assert made.engines.proven == [(0, before)]
        assert made.trainer.forward([TOKENS])[0].tolist() != before


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
        await made.roll_out(3, engines=(OTHER,))
        assert made.loop.batcher.doubted == {(ENGINE, 1, 0)}
        await made.stream.append(ROLLOUTS + "a", [encode_group(replace(group(2), group_id="again"))], first_id=9)
        assert (await made.wait_for(StepDone)).orders == [2, 3], "healthy engines sampled them"


@pytest.mark.parametrize("then", ["gets other weights", "has no time left", "leaves"])
async def test_group_of_an_engine_that_never_proves_its_weights_is_sampled_again(tmp_path, monkeypatch, then):
    monkeypatch.setattr(publishing, "_AGAIN_S", 0.0)
    async with room(tmp_path) as made:
        made.engines.silent = {ENGINE}
        await made.begin(publish_to=[ENGINE, OTHER])
        await made.roll_out(0, engines=(ENGINE,))
        await made.roll_out(1, 2, engines=(OTHER,))
        assert (await made.wait_for(StepDone)).orders == [1, 2]
        if then == "has no time left":
            monkeypatch.setattr(publishing, "_PROOF_S", 0.0)
            await made.say("e1-step-1")
            assert (await made.wait_for(CanaryChecked)).failed == {ENGINE: "no answer before the trainer's next step"}
        else:
            made.engines.silent = set()
            await made.say("e1-step-1", publish_to=[OTHER] if then == "leaves" else [ENGINE, OTHER])
        assert (await made.wait_for(OrdersEnded)).again == [0]


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


async def test_failure_of_all_engines_points_to_the_trainer_and_the_transport(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        made.engines.wrong = {0}
        await made.say("again-e1-0", publish_to=[ENGINE, OTHER])
        for reason in (await made.wait_for(CanaryChecked)).mismatched.values():
            assert reason.startswith("all 2 checked engines fail, so look first at the trainer")


# --- groups -----------------------------------------------------------------------------------------------------------


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
    async with room(tmp_path, settings={"no_signal": NoSignal.FILTER}, samples=samples) as made:
        await made.begin()
        await made.roll_out(0, 1, rewards=(1.0, 1.0))
        assert (await made.wait_for(OrdersEnded)).consumed.trained == 0
        await made.roll_out(2, 3)
        done = await made.wait_for(StepDone)
        figures = done.by_domain["test"]
        assert (figures["groups"], figures["stale_groups"], figures["rollouts"]) == (4, 0, 8)
        assert (figures["all_right"], figures["accuracy"]) == (0.5, 0.75) and done.by_tag == {}
    log.close()
    trained, filtered = read_samples(tmp_path)
    assert trained.step == 1 and filtered.filtered == {"no signal": 2} and filtered.group_id == group(1).group_id


async def test_solved_problems_are_reported_once_and_unreported_ones_are_kept_in_checkpoints(tmp_path):
    def solved(index):
        return replace(group(index, (1.0, 1.0)), problem=ProblemSummary(f"p{index}"))

    async with room(tmp_path, settings={"no_signal": NoSignal.FILTER}) as made:
        await made.begin()
        await made.put(solved(0), solved(1), group(2), group(3))
        first = await made.wait_for(StepDone)
        assert first.solved == {"test": [(0, "p0"), (1, "p1")]}
        await made.put(solved(4))
        await made.say(first.report_id, checkpoint=True, controller_state={})
        restored = await made.saved()
        await made.roll_out(5, 6)
        assert (await made.wait_for(StepDone, 2)).solved == {"test": [(4, "p4")]}
    assert restored.solved == {"test": [[4, "p4"]]}
    async with room(tmp_path / "again", restored=restored) as made:
        assert (await made.wait_for(TrainerReady)).solved == {"test": [(4, "p4")]}


async def test_step_with_enough_rollouts_waits_for_a_group_that_would_be_too_old_for_later_steps(tmp_path):
    async with room(tmp_path, settings={"overdue_s": PATIENCE_S}) as made:
        due = {"fresh_until": [(0, 1)], "issued": 3}
        await made.begin(**due)
        await made.roll_out(0, 1)
        await made.until(lambda: len(made.loop.batcher.waiting) == 2)
        await asyncio.sleep(0.1)
        assert not await made.reports(StepDone), "order 2 could train no other step"
        await made.say("ended-e1-2", failed=[2], **due)
        assert (await made.wait_for(StepDone)).orders == [0, 1]


# --- steps and directives ---------------------------------------------------------------------------------------------


async def test_trainer_reports_each_step_and_waits_for_the_controllers_answer_before_the_next(tmp_path):
    """The learning rate is that of the answer's knobs times the schedule's factor."""
    async with room(tmp_path, warmup_steps=4) as made:
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, 2, 3)
        done = await made.wait_for(StepDone)
        assert (done.report_id, done.model_version, done.consumed.trained) == ("e1-step-1", 1, 2)
        assert done.stats["rollouts"] == 4.0 and done.stats["grad_norm"] > 0
        assert done.stats["learning_rate"] == pytest.approx(0.1 / 4)
        await asyncio.sleep(0.1)
        assert made.trainer.model_version == 1, "the second batch is ready, but the controller has not answered"
        await made.say("e1-step-1", publish_to=[ENGINE], membership=2, learning_rate=0.8)
        second = await made.wait_for(StepDone, 2)
        assert (second.consumed.frontier, second.stats["learning_rate"]) == (4, pytest.approx(0.8 * 2 / 4))
        await made.say("e1-step-2", stop=True)
        assert await made.ended() == 2
        assert (await made.wait_for(TrainerStopped)).model_version == 2
        assert (made.engines.taken, made.steps) == ([(1, 0, 1), (1, 1, 2)], [1, 2])


@pytest.mark.parametrize("while_it", ["waits for rollouts", "is in a step"])
async def test_preempted_trainer_finishes_its_step_and_saves_its_state(tmp_path, while_it):
    """Groups that arrive for the next step stay in the stream."""
    async with room(tmp_path) as made:
        made.engines.gate.clear()
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, *((2, 3) if while_it == "is in a step" else ()))
        await made.until(lambda: made.loop.batcher.ledger.counts[GroupOutcome.TRAINED])
        if while_it == "is in a step":
            made.loop.leave()
        made.engines.gate.set()
        done = await made.wait_for(StepDone)
        await made.say(done.report_id)
        made.loop.leave()
        leaving = await made.wait_for(TrainerLeaving)
        assert (leaving.model_version, leaving.consumed.trained) == (1, 2)
        await made.say(leaving.report_id, stop=True, checkpoint=True, controller_state={"a": 1})
        assert await made.ended() == 1
        state = await made.saved()
        assert (state.model_version, state.controller) == (1, {"a": 1})
        assert (await made.wait_for(TrainerStopped)).left


async def test_trainer_saves_one_checkpoint_even_if_the_controller_sends_two_stop_directives(tmp_path):
    """One stop directive comes unsolicited while the trainer waits for an answer, the other is the answer itself."""
    async with room(tmp_path) as made:
        await made.begin()
        await made.roll_out(0, 1)
        done = await made.wait_for(StepDone)
        await made.say("suspend-e1-0", stop=True, checkpoint=True, controller_state={"a": 1})
        await made.say(done.report_id, stop=True, checkpoint=True, controller_state={"a": 2})
        assert await made.ended() == 1
        assert [saved.model_version for saved in await made.reports(Checkpointed)] == [1]


@pytest.mark.parametrize("kind", [StepDone, StepSkipped])
async def test_step_ends_only_after_the_publication_in_progress_has_ended(tmp_path, kind):
    async with room(tmp_path) as made:
        made.engines.gate.clear()
        await made.begin(publish_to=[ENGINE])
        await made.roll_out(0, 1, poison=kind is StepSkipped)
        await asyncio.sleep(0.2)
        assert made.trainer.model_version == 0 and not await made.reports(kind)
        made.engines.gate.set()
        await made.wait_for(kind)
        kinds = [type(report) for report in await made.reports()]
        assert kinds.index(Published) < kinds.index(kind)
        assert made.engines.taken == [(1, 0, 1)]


async def test_failed_publication_is_reported_and_training_continues(tmp_path):
    async with room(tmp_path) as made:
        made.engines.broken = "engine-0 left the group"
        await made.begin(publish_to=[ENGINE, OTHER])
        await made.roll_out(0, 1)
        failed = await made.wait_for(Published)
        assert failed.failed == dict.fromkeys([ENGINE, OTHER], "engine-0 left the group")
        assert (failed.pauses_s, failed.model_version, failed.membership) == ({}, 0, 1)
        assert (await made.wait_for(StepDone)).model_version == 1


@pytest.mark.parametrize("where", ["publish", "check"])
async def test_trainer_that_waits_for_rollouts_ends_if_a_publication_crashes(tmp_path, monkeypatch, where):
    async def dies(*_):
        raise RuntimeError("a fault of ours")

    async with room(tmp_path) as made:
        monkeypatch.setattr(Engines, where, dies)
        await made.begin(publish_to=[ENGINE], to_verify=[ENGINE])
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await made.ended(SOON_S)


async def test_checkpoint_contains_the_state_to_resume_from(tmp_path):
    restored = TrainingState(
        model_version=0,
        offsets={},
        ledger=ConsumedLedger().to_record(),
        controller={},
        epoch=2,
        epochs=[[1, 0], [2, 0]],
        baselines={"test": 2.0},
    )
    async with room(tmp_path, restored=restored, objective="rae") as made:
        await made.begin(epoch=4)
        await made.roll_out(0, 1, 2)
        await made.wait_for(StepDone)
        await made.say("e4-step-1", epoch=4, checkpoint=True, controller_state={"epoch": 4, "knobs": {}}, failed=[7])
        saved, (path, _) = await made.saved(), made.store.latest()
        assert str(path) == (await made.wait_for(Checkpointed)).path
        assert (saved.model_version, saved.epoch, saved.controller) == (1, 4, {"epoch": 4, "knobs": {}})
        counts = {"trained": 2, "filtered": 0, "stale": 0, "failed": 1}
        assert saved.ledger == {"frontier": 2, "beyond": [7], "counts": counts}
        assert saved.offsets[ROLLOUTS + "a"] == "2-0", "group 2 waits and is read again"
        assert saved.epochs == [[1, 0], [2, 0], [4, 0]], "the version at which each epoch began"
        expected = 2.0
        for reward in (0.0, 1.0, 0.0, 1.0):  # the rewards of the four rollouts in groups 0 and 1
            expected = 0.95 * expected + 0.05 * reward
        assert saved.baselines == {"test": pytest.approx(expected)}
        again = BigramTrainer()
        again.init_worker(TrainerSpec(model_path=tmp_path / "model", restore_from=path / "trainer"))
        assert again.model_version == 1


async def test_trainer_that_waits_for_rollouts_publishes_to_joining_engines_and_obeys_a_stop_directive(tmp_path):
    async with room(tmp_path) as made:
        await made.begin()
        await made.say("reload-e1-0-m2", publish_to=[ENGINE], membership=2)
        assert (await made.wait_for(Published)).pauses_s == {ENGINE: 0.001}
        await made.say("stop-e1", stop=True, publish_to=[ENGINE], membership=3)
        assert await made.ended() == 0
        assert made.engines.taken == [(1, 0, 2), (1, 0, 3)], "the last weights are served"
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
        with pytest.raises(DivergedError, match="last time since behavior_logprobs of groups 4, 5 was not finite"):
            await made.ended()
        state = await made.saved()
        assert (state.model_version, state.controller) == (0, {"a": 1})
        assert state.ledger["counts"] == {"trained": 0, "filtered": 6, "stale": 0, "failed": 0}
        assert made.engines.taken == [(1, 0, 1)]
        assert not await made.reports(TrainerStopped), "the run has not come to its end"


async def test_trainers_first_report_names_the_epoch_that_last_claimed_the_checkpoint_store(tmp_path):
    """Otherwise a restarted controller could assign an epoch that may no longer write checkpoints."""
    CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=tmp_path).claim(4)
    async with room(tmp_path) as made:
        assert (await made.wait_for(TrainerReady)).claimed == 4


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
            await made.ended()
        assert made.engines.taken == []


@pytest.mark.parametrize("culprit", ["controller", "actors"])
async def test_error_of_a_trainer_that_waited_too_long_blames_the_actors_or_the_controller(tmp_path, culprit):
    async with room(tmp_path, settings={"deadline_s": 0.5}) as made:
        sentence = "the controller to answer ready-"
        if culprit == "actors":
            await made.begin()
            await made.roll_out(0)
            sentence = "step 1 needs 4 rollouts and has 1 groups, and nothing arrived"
        with pytest.raises(DeadlineError, match=sentence):
            await made.ended()


@pytest.mark.parametrize("by", ["groups", "directives", "groups that teach nothing"])
async def test_trainer_keeps_waiting_for_rollouts_past_its_deadline_as_long_as_messages_arrive(
    tmp_path, monkeypatch, by
):
    """The clock advances by almost a deadline before each arrival, so that the whole wait is several deadlines long."""
    ahead_s = 0.0
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    async with room(tmp_path, settings={"no_signal": NoSignal.FILTER}) as made:
        batcher = made.loop.batcher

        def taken_in():
            return len(batcher.waiting), dict(batcher.ledger.counts), made.loop.link.current

        await made.roll_out(0)
        await made.begin(rollouts_per_step=8)
        await made.until(lambda: len(batcher.waiting) == 1)
        for number in (1, 2, 3):
            before = taken_in()
            ahead_s += 0.7 * PATIENCE_S
            if by == "directives":
                await made.say(f"knobs-e1-{number}", rollouts_per_step=8)
            else:
                await made.roll_out(number, rewards=(0.0, 1.0) if by == "groups" else (1.0, 1.0))
            await made.until(lambda before=before: taken_in() != before)
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
        await made.ended()
    assert [cores for cores, _ in used] == [[], [0, 1], []]
    assert {name.partition("_")[0] for _, name in used} == {"trainer"}
