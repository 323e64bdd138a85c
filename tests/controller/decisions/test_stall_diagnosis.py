"""Tests of the watchdog: it names the blocker once per stall, and is silent during progress."""

from __future__ import annotations

import random
from typing import Any

from pipelinerl.controller.decisions.stall_diagnosis import waiting_for
from pipelinerl.controller.state.effects import Record
from pipelinerl.controller.state.inputs import EngineRegistered, EngineTimedOut, ReportReceived, Ticked
from pipelinerl.messages import ActorAlive, CheckpointDelayed, Checkpointed, Starving
from tests.controller.world import ENGINE, World, controller

STALL_S = controller().settings.stall_s


def stalls(run: World, now: float) -> list[dict[str, Any]]:
    effects = run.controller.decide(Ticked(now=now))
    return [effect.fields for effect in effects if isinstance(effect, Record) and effect.kind == "stalled"]


def test_run_without_engines_is_reported_once() -> None:
    run = World(controller(), random.Random(0))
    run.give(Ticked(now=1.0))
    assert stalls(run, STALL_S) == []
    (told,) = stalls(run, STALL_S + 2.0)
    assert told == {"still_s": STALL_S + 1.0, "waits_for": "an engine to join"}
    assert stalls(run, 3 * STALL_S) == [], "once"


def test_steps_reset_the_watchdog_and_starving_reports_do_not() -> None:
    run = World(controller(evaluation_problems=0), random.Random(0))
    run.begin()
    run.publish()
    run.give(Ticked(now=100.0))
    began = run.controller.state.watchdog.moved_at
    run.give(ReportReceived(now=101.0, report=Starving(epoch=1, model_version=0, held=[]), entry_id="1-0"))
    assert run.controller.state.watchdog.moved_at == began, "to say that one waits is no progress"
    while run.version == 0:
        run.act()
    assert stalls(run, STALL_S - 1) == []


def test_status_names_the_blocker() -> None:
    run = World(controller(evaluation_problems=0), random.Random(0))
    run.begin()
    state = run.controller.state
    assert "the trainer's last report, TrainerReady, came 60 s ago" in waiting_for(state, now=60.0)
    run.publish()
    assert waiting_for(state, now=60.0) == "an actor to report"
    alive = ActorAlive(name="actor-7", groups_in_flight=3, groups_done=0, retries=0)
    run.give(ReportReceived(now=20.0, report=alive, entry_id="1-0"))
    assert waiting_for(state, now=60.0) == "step 1: 4 groups in flight; actor actor-7 has been silent for 40 s"
    run.give(ReportReceived(now=59.0, report=alive, entry_id="1-0"))
    assert "the trainer's last report, CanaryChecked, came 60 s ago" in waiting_for(state, now=60.0)
    run.give(EngineTimedOut(now=61.0, url=ENGINE, reason="no answer within 5 s"))
    assert waiting_for(state, now=62.0) == f"an engine to join; {ENGINE} is dead: no answer within 5 s"


def test_dead_trainer_is_named_while_engines_wait_for_weights() -> None:
    run = World(controller(), random.Random(0))
    run.begin()
    run.publish()
    run.give(EngineRegistered(now=1.0, url=ENGINE, incarnation="one life"))
    run.give(EngineRegistered(now=2.0, url=ENGINE, incarnation="the next"))
    assert waiting_for(run.controller.state, now=90.0).startswith(f"the trainer to publish its weights to {ENGINE}")


def test_delayed_checkpoint_is_recorded_once_and_shown_until_it_is_written() -> None:
    run = World(controller(evaluation_problems=0), random.Random(0))
    run.begin()
    run.publish()

    def told(report: CheckpointDelayed | Checkpointed) -> list[str]:
        effects = run.controller.decide(ReportReceived(now=1.0, report=report, entry_id="1-0"))
        return [effect.kind for effect in effects if isinstance(effect, Record)]

    delayed = CheckpointDelayed(epoch=1, model_version=10, reason="OSError: No space left on device")
    assert told(delayed) == ["checkpoint_delayed"]
    assert told(delayed) == []
    said = waiting_for(run.controller.state, now=1.0)
    assert said.endswith("; the checkpoint of step 10 cannot be written yet: OSError: No space left on device")
    assert told(Checkpointed(epoch=1, model_version=10, path="c")) == ["checkpoint"]
    assert "cannot be written" not in waiting_for(run.controller.state, now=1.0)
    assert told(delayed) == ["checkpoint_delayed"], "a new one"


def test_run_waits_for_an_engine_with_weights_until_it_proves_them() -> None:
    run = World(controller(), random.Random(0))
    run.begin()
    state = run.controller.state
    state.fleet.on_published(ENGINE, 0, membership=state.fleet.membership)
    assert waiting_for(state, now=1.0) == f"{ENGINE} to prove its weights to the trainer"
