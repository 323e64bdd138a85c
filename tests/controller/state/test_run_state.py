"""Tests of the controller's part of a checkpoint, and of resuming it with an edited recipe."""

import msgspec
import pytest

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.decisions.status import run_status
from pipelinerl.controller.decisions.watch import EngineWatch
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationPlan
from pipelinerl.controller.state.run_state import NOWHERE, Evaluations
from pipelinerl.errors import RecipeError
from pipelinerl.types import Quota
from tests.controller.world import controller


def gone_on(made, **recipe):
    """Return a controller that resumes from the checkpoint of step 5; `recipe` gives the knobs in its recipe."""
    resumed = controller(**recipe)
    record = msgspec.json.decode(msgspec.json.encode(made.state.checkpoint_record()))
    resumed.state.resume(record, step=5)
    return resumed


def test_resumed_run_follows_the_edited_recipe_except_for_knobs_that_were_changed_during_the_run():
    made = controller(learning_rate=0.1, k=4)
    for k in (6, 9):
        made.patch({"k": k}, who="ada", time=3.0)
    resumed = gone_on(made, learning_rate=0.01, k=5)
    assert (resumed.state.knobs.learning_rate, resumed.state.knobs.k) == (0.01, 9)
    *live, last = resumed.state.knob_log
    assert live == made.state.knob_log
    assert (last.step, last.who, last.changes, last.live) == (5, "the edited recipe", {"learning_rate": 0.01}, False)
    again = gone_on(resumed, learning_rate=0.002, k=5)
    assert (again.state.knobs.learning_rate, again.state.knobs.k) == (0.002, 9), "an edit is no live change"


def test_resumed_run_shows_the_step_of_its_checkpoint_before_its_trainer_is_ready():
    resumed = gone_on(controller())
    shown = run_status(resumed, watch=EngineWatch(), name="run", now=0.0, elapsed_s=0.0)
    assert (shown.step, shown.phase) == (5, "starting")


def test_groups_requested_before_a_resume_keep_their_domain_weights_and_new_ones_follow_the_recipe():
    made = controller(domain_weights={"a": 1.0, "b": 2.0})
    made.state.account.cursor = 7
    resumed = gone_on(made, domain_weights={"a": 3.0, "c": 1.0})
    assert resumed.state.domain_weights_of(6) == {"a": 1.0, "c": 0.0}
    assert resumed.state.domain_weights_of(7) == {"a": 3.0, "c": 1.0}


def test_groups_that_are_requested_again_keep_the_domain_quota_of_their_first_request():
    made = controller(rollouts_per_step=4)
    made.state.follow(0)
    made.state.account.cursor = 5
    made.patch({"rollouts_per_step": 16}, who="ada", time=3.0)
    made.state.follow(0)
    made.patch({"rollouts_per_step": 8}, who="ada", time=3.0)
    made.state.follow(0)
    assert made.state.quotas == [Quota(0, 2), Quota(5, 4)], "of what no order was issued by, nothing is left"
    resumed = gone_on(made, rollouts_per_step=12).state
    resumed.account.cursor = 9
    assert resumed.knobs.rollouts_per_step == 8, "as it was set live"
    resumed.follow(0)
    assert [resumed.quota_of(index) for index in (0, 4, 5, 90)] == [Quota(0, 2)] * 2 + [Quota(5, 4)] * 2


def test_domain_weight_set_during_the_run_is_dropped_when_the_recipe_drops_the_domain():
    made = controller(domain_weights={"a": 1.0, "b": 2.0})
    made.patch({"domain_weights": {"a": 5, "b": 7}}, who="ada", time=3.0)
    assert gone_on(made, domain_weights={"a": 3.0, "c": 1.0}).state.knobs.domain_weights == {"a": 5.0, "c": 1.0}
    assert gone_on(made, domain_weights={"c": 1.0}).state.knobs.domain_weights == {"c": 1.0}


def test_recipe_that_contradicts_knob_changes_made_during_the_run_is_rejected():
    made = controller()
    made.patch({"k": 6}, who="ada", time=3.0)
    with pytest.raises(RecipeError, match=r"staleness.k must be at least j = 8, got 6"):
        gone_on(made, j=8, k=8)


def test_results_of_evaluation_sets_that_the_recipe_moved_or_removed_keep_their_names():
    evaluations = Evaluations()
    for name, place in (("math", 0), ("aime", 1), ("math", 0)):
        one_set = EvaluationSet(name=name, place=place, problems=1, max_tokens=8)
        (result,) = Evaluation(model_version=1, number=1, plan=EvaluationPlan(sets=(one_set,))).results()
        evaluations.add(result)
    evaluations.follow({"new": 0, "math": 1})
    assert [(each.name, each.place) for each in evaluations.results] == [("math", 1), ("aime", NOWHERE), ("math", 1)]
