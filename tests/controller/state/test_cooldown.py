"""Tests of the cooldown, during which solved problems are skipped; it continues in a resumed run.

The quotas of the domains stay exact.
"""

import json
import random
from collections import Counter
from functools import partial

import msgspec
import pytest

from pipelinerl.config.learning import CooldownSection
from pipelinerl.controller.state.cooldown import MOST_PASSED, Cooldown
from pipelinerl.data.mixture import Domain, Mixture
from pipelinerl.messages import ConsumedReport
from pipelinerl.types import Quota
from tests.controller.world import World, controller, problem, step_done

EPOCHS = {"easy": CooldownSection(epochs=2), "hard": CooldownSection(epochs=2)}
QUOTA = Quota(0, 4)


class Ring:
    """A data set of `size` problems, which come in the same order in each epoch."""

    def __init__(self, domain, size):
        self._domain, self._size = domain, size

    def problem(self, index):
        return problem(f"{self._domain}:{index % self._size}", self._domain)


def alone(size):
    return Mixture([Domain(name="easy", weight=1.0, source=Ring("easy", size))], seed=0, quota=QUOTA)


def problem_of(cooldown, mixture, index, *, version=0, frontier=0):
    draw = partial(mixture.problem, index)
    return cooldown.choose(index, lambda ahead: draw(ahead=ahead), version=version, frontier=frontier).problem_id


def solve(cooldown, order, name, *, rules=EPOCHS, version=0):
    cooldown.note({name.partition(":")[0]: [(order, name)]}, rules, version=version)


def test_problem_solved_once_is_skipped_for_the_configured_two_epochs():
    cooldown, mixture = Cooldown(), alone(4)
    first = [problem_of(cooldown, mixture, index) for index in range(4)]
    solve(cooldown, 1, "easy:1")
    assert first == ["easy:0", "easy:1", "easy:2", "easy:3"]
    assert [problem_of(cooldown, mixture, index) for index in range(4, 10)] == ["easy:0", "easy:2", "easy:3"] * 2
    assert [problem_of(cooldown, mixture, index) for index in range(10, 14)] == first
    assert cooldown.take_figures() == {"easy": {"resting": 0.0, "passed_over": 2.0}}


def test_cooldown_given_in_steps_ends_after_that_many_steps():
    cooldown, mixture, rules = Cooldown(), alone(2), {"easy": CooldownSection(steps=3)}
    solve(cooldown, 0, "easy:0", rules=rules, version=5)
    assert [problem_of(cooldown, mixture, index, version=7) for index in range(3)] == ["easy:1"] * 3
    assert problem_of(cooldown, mixture, 3, version=8) == "easy:0"


def test_problem_is_skipped_only_after_two_different_groups_solved_it():
    cooldown, mixture, rules = Cooldown(), alone(2), {"easy": CooldownSection(epochs=1, times=2)}
    for _ in range(3):
        solve(cooldown, 0, "easy:0", rules=rules)
    assert problem_of(cooldown, mixture, 2) == "easy:0"
    solve(cooldown, 2, "easy:0", rules=rules)
    assert problem_of(cooldown, mixture, 4) == "easy:1"


@pytest.mark.parametrize("rules", [{}, {"easy": CooldownSection()}, {"another": CooldownSection(epochs=1)}])
def test_no_problem_is_skipped_without_a_cooldown_rule(rules):
    cooldown, mixture = Cooldown(), alone(2)
    solve(cooldown, 0, "easy:0")
    solve(cooldown, 1, "easy:1", rules=rules)
    assert problem_of(cooldown, mixture, 2) == "easy:0"


def test_group_that_is_requested_again_gets_the_same_problem():
    cooldown, mixture = Cooldown(), alone(5)
    first = []
    for index in range(30):
        first.append(problem_of(cooldown, mixture, index))
        if index % 3 == 0:
            solve(cooldown, index, first[-1])
    assert [problem_of(cooldown, mixture, index) for index in range(30)] == first
    assert len(set(first)) == 5


def test_solved_problems_are_sampled_again_if_no_others_are_left():
    cooldown, mixture, rules = Cooldown(), alone(3), {"easy": CooldownSection(steps=100)}
    for number in range(3):
        solve(cooldown, number, f"easy:{number}", rules=rules)
    assert problem_of(cooldown, mixture, 3).startswith("easy:")
    assert cooldown.take_figures()["easy"] == {"resting": 3.0, "passed_over": float(MOST_PASSED), "nothing_else": 1.0}
    assert cooldown.take_figures()["easy"] == {"resting": 3.0, "passed_over": 0.0}, "each count is reported once"


def test_skipping_solved_problems_keeps_domain_quotas_exact_and_is_restored_on_resume():
    def mixture():
        domains = [Domain(name="easy", weight=3.0, source=Ring("easy", 40)),
                   Domain(name="hard", weight=1.0, source=Ring("hard", 40))]  # fmt: skip
        return Mixture(domains, seed=3, quota=QUOTA)

    def go_on(cooldown, indices):
        drawn, seen = mixture(), []
        for index in indices:
            seen.append(problem_of(cooldown, drawn, index, frontier=max(0, index - 8)))
            if random.Random(seen[-1]).random() < 0.6 and index % 5:
                solve(cooldown, index, seen[-1])
        return seen

    cooldown = Cooldown()
    before = go_on(cooldown, range(600))
    record = json.loads(json.dumps(msgspec.to_builtins(cooldown)))
    after = go_on(cooldown, range(600, 1200))
    assert after == go_on(msgspec.convert(record, Cooldown), range(600, 1200))
    names = [name.partition(":")[0] for name in before + after]
    assert all(names[at : at + 4].count("easy") == 3 for at in range(0, 1200, 4))
    assert len(cooldown.domains["easy"].passed) < 10, "what has ended needs no record"
    counts = Counter(before + after)
    solvable = [name for name in counts if random.Random(name).random() < 0.6]
    others = [name for name in counts if name not in solvable and name.startswith("easy")]
    assert max(counts[name] for name in solvable) < min(counts[name] for name in others)


def test_problem_that_the_trainer_reports_as_solved_is_skipped_in_later_groups():
    def turns_of(rule):
        run = World(controller(evaluation_problems=0, k=1, cooldown={"b": rule}))
        domains = [Domain(name=name, weight=1.0, source=Ring(name, 3)) for name in "ab"]
        run.controller._training_problem = Mixture(domains, seed=0, quota=QUOTA).problem
        run.begin(serves=True)
        solved = next(order for order in run.orders_issued if order.problem.domain == "b")
        passed = 0.0
        for version in range(1, 7):
            consumed = ConsumedReport(trained=len(run.issued), frontier=len(run.issued))
            pairs = {"b": [(solved.index, solved.problem.problem_id)]} if version == 1 else {}
            run.version = version
            run.tell(step_done(version, consumed, solved=pairs))
            passed += run.state.watched.by_domain.get("b", {}).get("passed_over", 0.0)
            run.publish()
        return [order.problem.problem_id for order in run.orders_issued if order.problem.domain == "b"], passed

    (always, none), (rested, passed) = turns_of(CooldownSection()), turns_of(CooldownSection(epochs=1))
    turn = always.index(always[0], 1)
    assert always[:turn] == rested[:turn] and rested[turn] != always[turn]
    assert (none, passed) == (0.0, 1.0)
