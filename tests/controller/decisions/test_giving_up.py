"""Tests of how a run that cannot continue ends: one test per cause, each with its one-sentence reason."""

from dataclasses import replace

import msgspec
import pytest

from inference_contract.errors import ContextExceeded, Persistence
from pipelinerl.controller.decisions.giving_up import finish, waiting_for
from pipelinerl.controller.decisions.step_review import CALM_S, CALM_STEPS
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    End,
    EngineRegistered,
    EngineTimedOut,
    Finish,
    IssuePrompts,
    Send,
    StopAsked,
    SuspendAsked,
    Ticked,
)
from pipelinerl.controller.state.run_state import RunPhase
from pipelinerl.enums import NoSignal
from pipelinerl.messages import (
    CheckpointDelayed,
    Checkpointed,
    ConsumedReport,
    GroupFailed,
    NoSignalGroups,
    OrdersEnded,
    Starving,
    TrainerStopped,
    VerifierFigures,
)
from tests.controller.world import (
    ENGINE,
    OTHER,
    World,
    alive,
    controller,
    directives,
    joins,
    kinds,
    published,
    received,
    records,
)

REFUSAL = "refused: the update does not fit the model: parameter 'a' must have dtype float32, got int8"


def begun():
    """Return a run whose engine has joined and whose trainer is ready, before the first publication."""
    made = World(controller(evaluation_problems=0, k=8))
    made.state.lag.steps = 4.0
    made.begin()
    return made


def serving():
    made = begun()
    made.publish()
    assert made.state.fleet.serving() == [ENGINE]
    return made


def failed_to_publish(made, reasons, *, permanent):
    membership = made.state.fleet.membership
    return received(
        published((), version=made.state.version, membership=membership, failed=reasons, permanent=permanent)
    )


def ends(made, given):
    """Return the stop directive and the `Finish` effect that `given` causes, each None if there is none."""
    effects = made.decide(given)
    sent = [directive for directive in directives(effects) if directive.stop]
    return (sent[-1] if sent else None), next((effect for effect in effects if isinstance(effect, Finish)), None)


def test_run_saves_and_ends_only_when_its_only_engine_refuses_weights_permanently():
    made = begun().controller
    assert ends(made, failed_to_publish(made, {ENGINE: "was lost at prepare"}, permanent=[])) == (None, None)
    assert made.state.fleet.by_url[ENGINE].lifecycle is EngineLifecycle.DIRTY
    made = begun().controller
    stop, finish = ends(made, failed_to_publish(made, {ENGINE: REFUSAL}, permanent=[ENGINE]))
    assert made.state.fleet.by_url[ENGINE].lifecycle is EngineLifecycle.EXPELLED
    assert finish is None and stop is not None and stop.checkpoint and stop.publish_to == []
    _, finish = ends(made, received(TrainerStopped(epoch=made.state.epoch, model_version=0)))
    assert finish == Finish(f"no engine can serve this run: {ENGINE} {REFUSAL}", End.FAILED)
    assert made.state.phase is RunPhase.FINISHED
    assert ends(made, Ticked(now=1e6)) == (None, None), "it ends once"


@pytest.mark.parametrize("end", [End.FAILED, End.SUSPENDED])
def test_failing_or_suspended_run_waits_for_its_trainer_to_save_only_up_to_a_time_limit(end):
    made = begun().controller
    refusal = failed_to_publish(made, {ENGINE: REFUSAL}, permanent=[ENGINE])
    ends(made, refusal if end is End.FAILED else SuspendAsked(now=0.0, reason="suspended by somebody"))
    assert ends(made, Ticked(now=29.0)) == (None, None)
    _, finish = ends(made, Ticked(now=31.0))
    assert finish.end is end


def test_run_ends_only_when_the_last_engine_that_may_still_serve_has_refused_weights_permanently():
    """An engine that was expelled for its failures may return after a rest."""
    run = begun()
    made, fleet = run.controller, run.state.fleet
    run.give(joins(OTHER))
    fleet.by_url[OTHER] = replace(fleet.by_url[OTHER], lifecycle=EngineLifecycle.EXPELLED, loaded=-1, expulsions=1)
    assert ends(made, failed_to_publish(made, {ENGINE: REFUSAL}, permanent=[ENGINE])) == (None, None)
    made.decide(joins(OTHER, now=1.0))
    returns_at = fleet.by_url[OTHER].returns_at
    assert 1.0 < returns_at < made.settings.run.engine_timeout_s
    made.decide(EngineRegistered(now=returns_at, url=OTHER, incarnation="1"))
    assert fleet.by_url[OTHER].lifecycle is EngineLifecycle.JOINING and not made.state.failing.reason
    stop, _ = ends(made, failed_to_publish(made, {OTHER: REFUSAL}, permanent=[OTHER]))
    assert stop is not None and ENGINE in made.state.failing.reason and OTHER in made.state.failing.reason


def test_run_without_an_engine_ends_after_a_time_limit_that_starts_again_when_an_engine_joins():
    made = controller()
    assert ends(made, Ticked(now=10.0)) == ends(made, Ticked(now=309.0)) == (None, None)
    _, finish = ends(made, Ticked(now=311.0))
    assert finish.end is End.FAILED
    assert finish.reason.startswith("no engine has been alive for 300 s (run.engine_timeout_s)")
    made = serving().controller
    made.decide(joins(ENGINE, now=1000.0))
    made.decide(EngineTimedOut(now=1001.0, url=ENGINE, reason="no answer"))
    assert ends(made, Ticked(now=1300.0)) == (None, None)
    made.decide(joins(ENGINE, "2", now=1300.5))
    assert ends(made, Ticked(now=1400.0)) == (None, None)
    made.decide(EngineTimedOut(now=1400.0, url=ENGINE, reason="no answer"))
    stop, _ = ends(made, Ticked(now=1701.0))
    assert stop is not None and f"{ENGINE} is dead: no answer" in made.state.failing.reason


def beat(name, **verifiers):
    return alive(name, groups=1, verifiers=verifiers)


def failing(errors=0, timeouts=0, judged=0):
    return VerifierFigures(
        judged=judged, errors_in_a_row=errors, timeouts_in_a_row=timeouts, reason="verifier_error: r.py:3: KeyError"
    )


WELL = VerifierFigures(judged=400)
ERROR = "; the last error: verifier_error: r.py:3: KeyError"
#: The heartbeats of actors, of which only the last may end the run, and the reason with which it does.
FAILURES = {
    "20 errors in a row": (
        [beat("a", math=WELL, code=failing(19)), beat("a", math=WELL, code=failing(20, judged=70))],
        f"the verifier of domain code has failed on 20 answers in a row{ERROR}",
    ),
    "the errors of all actors are summed": (
        [beat("a", code=failing(10)), beat("b", code=failing(10))],
        f"the verifier of domain code has failed on 20 answers in a row{ERROR}",
    ),
    "another actor succeeds": ([beat("b", code=WELL), beat("a", code=failing(400))], ""),
    "as many timeouts as a step has rollouts": (
        [beat("a", code=failing(timeouts=31)), beat("a", code=failing(errors=1, timeouts=31))],
        f"the verifier of domain code has failed on 32 answers in a row{ERROR}",
    ),
    "episodes": (
        [beat("a", game=msgspec.structs.replace(failing(20), episodes=20))],
        f"the environment or verifier of domain game has failed on 20 answers in a row{ERROR}",
    ),
    "curation.filter": (
        [alive(filtering=failing(19)), alive(filtering=failing(20))],
        f"curation.filter has failed on 20 groups in a row{ERROR}",
    ),
}


@pytest.mark.parametrize(("beats", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_run_ends_when_whatever_judges_fails_repeatedly_for_all_actors(beats, reason):
    made = serving().controller
    made.state.knobs = replace(made.state.knobs, rollouts_per_step=32)
    for each in beats[:-1]:
        assert ends(made, received(each)) == (None, None)
    stop, _ = ends(made, received(beats[-1]))
    assert (stop is not None) is bool(reason) and made.state.failing.reason == reason


def lost(index, persistence, reason="no template", **fields):
    about = {"order_id": f"prompt-{index:06d}", "index": index, "purpose": "training"}
    return received(GroupFailed(**about, persistence=persistence, reason=reason, **fields))


@pytest.mark.parametrize(("persistence", "over"), [(Persistence.PERMANENT, True), (Persistence.TRANSIENT, False)])
def test_run_ends_only_if_engines_refuse_prompts_permanently(persistence, over):
    run = serving()
    made = run.controller
    for index in run.issued[:7]:
        assert ends(made, lost(index, persistence)) == (None, None)
    stop, _ = ends(made, lost(run.issued[7], persistence))
    assert (stop is not None) is over
    assert made.state.failing.reason == ("engines refuse the prompts of 8 groups in a row: no template" if over else "")


def too_long(index):
    return lost(index, Persistence.PERMANENT, "problem d:1: it has 90 tokens", code=ContextExceeded.code)


def test_prompts_that_are_too_long_are_replaced_and_end_the_run_only_if_all_are():
    """The prompts issued as replacements are also too long, and no group has been sampled yet."""
    made = serving().controller
    for index in range(8 * 8 - 1):
        effects = made.decide(too_long(index))
        assert "group_failed" in kinds(effects)
        assert any(isinstance(effect, IssuePrompts) for effect in effects), "another comes in its place"
    assert not made.state.failing.reason and made.state.account.ledger()["failed"] == 8 * 8 - 1
    assert any(ends(made, too_long(index))[0] is not None for index in (63, 64))
    assert made.state.failing.reason == (
        "64 prompts since the last step were too long, and no group was made: problem d:1: it has 90 tokens; raise "
        "engine.context_length, or remove such problems"
    )


# --- groups without signal -------------------------------------------------------------------------------------------


def without_signal(made, a, b):
    """Report groups whose rewards are all equal (no signal) of domains `a` and `b`; return the controller's effects."""
    state, ended = made.state, a.total + b.total
    state.account.cursor = max(state.account.cursor, ended)
    consumed = ConsumedReport(filtered=ended, frontier=ended, no_signal={"a": a, "b": b})
    return made.controller.decide(received(OrdersEnded(epoch=state.epoch, model_version=0, consumed=consumed)))


def test_run_whose_groups_are_all_correct_raises_an_alarm_and_then_completes():
    made = World(controller(evaluation_problems=4)).begin(serves=True)
    while made.state.evaluations.current is not None:
        made.sample()
        made.answer()
    assert kinds(without_signal(made, NoSignalGroups(right=15), NoSignalGroups(right=15))) == []
    assert kinds(without_signal(made, NoSignalGroups(right=20), NoSignalGroups(right=20))) == ["alarm"]
    effects = without_signal(made, NoSignalGroups(right=40), NoSignalGroups(right=40))
    (stop,) = directives(effects)
    assert stop.stop and stop.checkpoint and stop.publish_to == [ENGINE], "its last weights are evaluated"
    made.apply(effects)
    made.publish()
    made.tell(TrainerStopped(epoch=1, model_version=0))
    assert made.state.phase in (RunPhase.FINISHING, RunPhase.FINISHED)
    over = finish(made.state, made.controller.settings)
    assert over.end is End.COMPLETED and over.reason.startswith("solved: the last 80 groups")


@pytest.mark.parametrize(
    ("each", "advice"),
    [
        (NoSignalGroups(wrong=40), "take easier problems or a warm start"),
        (NoSignalGroups(other=40), "distinguishes answers"),
        (NoSignalGroups(refused=40), "loosen curation.filter"),
    ],
)
def test_run_whose_groups_all_have_equal_rewards_fails_with_advice(each, advice):
    made = serving()
    stop = [effect for effect in without_signal(made, each, each) if isinstance(effect, Send)]
    assert stop and stop[0].directive.stop
    over = finish(made.state, made.controller.settings)
    assert over.end is End.FAILED and advice in over.reason


def test_run_continues_while_one_active_domain_has_groups_with_differing_rewards():
    made = serving()
    assert kinds(without_signal(made, NoSignalGroups(right=10_000), NoSignalGroups(right=15))) == []
    made.state.knobs = made.state.knobs.patched({"domain_weights.b": 0.0})
    effects = made.controller.decide(Ticked(now=1.0))
    assert any(isinstance(effect, Send) and effect.directive.stop for effect in effects), "it is switched off"


def test_groups_with_equal_rewards_raise_only_an_alarm_if_the_recipe_trains_on_them():
    made = serving()
    made.controller.settings = replace(made.controller.settings, no_signal=NoSignal.TRAIN)
    effects = without_signal(made, NoSignalGroups(wrong=400), NoSignalGroups(wrong=400))
    assert kinds(effects) == ["alarm"] and made.state.stop_reason is None
    assert kinds(without_signal(made, NoSignalGroups(), NoSignalGroups(wrong=800))) == []
    made.state.version += CALM_STEPS
    assert kinds(made.controller.decide(Ticked(now=CALM_S))) == ["alarm_cleared"]


# --- suspended --------------------------------------------------------------------------------------------------------


def suspended(made, *, now=0.0):
    return ends(made.controller, SuspendAsked(now=now, reason="suspended by somebody"))


def test_suspended_run_saves_its_state_without_publication_or_evaluation():
    run = World(controller(evaluation_problems=4)).begin(serves=True)
    stop, finish = suspended(run)
    assert finish is None and stop is not None and stop.checkpoint and stop.publish_to == []
    assert "stop_reason" not in (stop.controller_state or {}), "who goes on with it does not stop at once"
    _, finish = ends(run.controller, received(TrainerStopped(epoch=1, model_version=0)))
    assert finish == Finish("suspended by somebody", End.SUSPENDED)
    assert suspended(run) == (None, None), "it ends once"


def test_run_without_a_ready_trainer_is_suspended_immediately():
    run = World(controller(evaluation_problems=0))
    assert suspended(run) == (None, Finish("suspended by somebody", End.SUSPENDED))
    late = [EngineRegistered(now=0.0, url=OTHER), StopAsked(now=0.0, reason="stopped by somebody"), Ticked(now=1e6)]
    sent = [effect for given in late for effect in run.controller.decide(given) if isinstance(effect, Send)]
    assert sent == [], "there is no trainer to send a directive to"


def test_stopping_run_can_still_be_suspended():
    """The last evaluation of a stopping run may take longer than the user can wait."""
    run = World(controller(evaluation_problems=4)).begin()
    run.give(StopAsked(now=0.0, reason="stopped by somebody"))
    run.train()
    assert run.state.phase is RunPhase.FINISHING and run.finished is None
    assert suspended(run) == (None, Finish("suspended by somebody", End.SUSPENDED))


STALL_S = controller().settings.run.stall_s


def stalls(run, now):
    effects = run.controller.decide(Ticked(now=now))
    return [record.fields for record in records(effects, "stalled")]


def test_stall_watchdog_counts_steps_as_progress_but_not_reports_of_a_waiting_trainer():
    run = World(controller(evaluation_problems=0)).begin(serves=True)
    run.give(Ticked(now=100.0))
    began = run.state.watchdog.moved_at
    run.give(received(Starving(epoch=1, model_version=0, held=[]), now=101.0))
    assert run.state.watchdog.moved_at == began, "to say that one waits is no progress"
    while run.version == 0:
        run.act()
    assert stalls(run, STALL_S - 1) == []


def test_status_names_what_the_run_waits_for():
    run = World(controller(evaluation_problems=0)).begin()
    state = run.state
    assert "the trainer's last report, TrainerReady, came 60 s ago" in waiting_for(state, now=60.0)
    state.fleet.on_published(ENGINE, 0, membership=state.fleet.membership)
    assert waiting_for(state, now=1.0) == f"{ENGINE} to pass the trainer's canary check"
    run.publish()
    assert waiting_for(state, now=60.0) == "an actor to report"
    beat = alive("actor-7", groups=3)
    run.tell(beat, now=20.0)
    assert waiting_for(state, now=60.0) == "step 1: 4 groups in flight; actor actor-7 has been silent for 40 s"
    run.tell(beat, now=59.0)
    assert "the trainer's last report, CanaryChecked, came 60 s ago" in waiting_for(state, now=60.0)
    run.give(EngineTimedOut(now=61.0, url=ENGINE, reason="no answer within 5 s"))
    assert waiting_for(state, now=62.0) == f"an engine to join; {ENGINE} is dead: no answer within 5 s"
    for life in "12":
        run.give(joins(ENGINE, life, now=63.0))
    assert waiting_for(state, now=90.0).startswith(f"the trainer to publish its weights to {ENGINE}")


def test_checkpoint_that_cannot_be_written_is_logged_once_and_stays_in_the_status_until_it_is_written():
    run = World(controller(evaluation_problems=0)).begin(serves=True)

    def events_after(report):
        return kinds(run.controller.decide(received(report, now=1.0)))

    delayed = CheckpointDelayed(epoch=1, model_version=10, reason="OSError: No space left on device")
    assert events_after(delayed) == ["checkpoint_delayed"]
    assert events_after(delayed) == []
    status = waiting_for(run.state, now=1.0)
    assert status.endswith("; the checkpoint of step 10 cannot be written yet: OSError: No space left on device")
    assert events_after(Checkpointed(epoch=1, model_version=10, path="c")) == ["checkpoint"]
    assert "cannot be written" not in waiting_for(run.state, now=1.0)
    assert events_after(delayed) == ["checkpoint_delayed"], "a new one"
