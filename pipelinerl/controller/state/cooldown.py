"""`Cooldown`: skips solved problems for a while, so that training uses problems with a learning signal. Pure.

    all answers of a group correct ─▶ noted ─▶ `times` such groups ─▶ the problem rests: skipped on its next `epochs`
    turns, or until `steps` steps have passed ─▶ issued again

Each problem has one turn per epoch of its data set. The turn of a skipped problem goes to the next problem of the same
domain, so quotas stay exact and no other problem of an epoch is left out. At most `MOST_PASSED` problems are skipped
for one prompt order; after that a resting problem is issued. A reissued order must have the same problem again.
Therefore `passed` records each order that skipped problems, with the total number of turns that its domain had skipped
by then. open-instruct's `no_resampling_pass_rate` (Olmo 3) excludes such prompts for good; RLAX §6.2 filters their
groups after sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from pipelinerl.config.learning import CooldownSection
from pipelinerl.types import Problem

#: The most resting problems that are skipped in search of a problem for one prompt order.
MOST_PASSED: Final = 1000

#: By domain, the prompt orders whose answers were all correct, each with the id of its problem.
Solved = Mapping[str, Sequence[tuple[int, str]]]


class CooldownPeriod(NamedTuple):
    """Remaining rest of a problem: the number of turns to skip, or the model version at which it is issued again."""

    turns: int
    until: int


class DomainCooldown(msgspec.Struct, kw_only=True):
    """Cooldown state of one domain, by problem id."""

    solved: dict[str, list[int]] = {}
    """Orders whose answers were all correct, by id of the problem; only for problems that do not rest yet."""
    resting: dict[str, CooldownPeriod] = {}
    passed: list[tuple[int, int]] = []
    """(order, turns), oldest first: from `order` on, the domain has skipped `turns` turns in total."""
    passed_since: int = 0
    """Turns skipped since the last step."""
    nothing_else: int = 0
    """Orders since the last step that got a resting problem, because `MOST_PASSED` resting problems came in a row."""

    def ahead(self, index: int) -> int:
        """Return the total number of turns (problems) that the domain has skipped up to order `index`, inclusive."""
        return next((turns for since, turns in reversed(self.passed) if since <= index), 0)

    def note(self, order: int, problem_id: str, rule: CooldownSection, *, version: int) -> None:
        """Record a prompt order whose answers were all correct; recording the same order again has no effect."""
        if problem_id in self.resting:
            return
        orders = self.solved.setdefault(problem_id, [])
        if order not in orders:
            orders.append(order)
        if len(orders) >= rule.times:
            del self.solved[problem_id]
            self.resting[problem_id] = CooldownPeriod(rule.epochs, version + rule.steps if rule.steps else 0)

    def pass_over(self, problem_id: str, *, version: int) -> bool:
        """Return True if the problem rests and must be skipped now; a rest measured in turns gets one turn shorter."""
        rest = self.resting.get(problem_id)
        if rest is None:
            return False
        if rest.turns:
            self.resting[problem_id] = rest._replace(turns=rest.turns - 1)
            return True
        if version < rest.until:
            return True
        del self.resting[problem_id]
        return False


class Cooldown(msgspec.Struct, kw_only=True):
    """Cooldown state of all domains; `drawn` is the lowest index whose order has not been given a problem yet."""

    drawn: int = 0
    domains: dict[str, DomainCooldown] = {}

    def note(self, solved: Solved, rules: Mapping[str, CooldownSection], *, version: int) -> None:
        """Record groups whose answers were all correct, and end the cooldown of problems whose rest is over."""
        # Domains without a cooldown rule have no resting problems, even if the recipe had a rule for them before.
        by_domain = {domain: rule for domain, rule in rules.items() if rule.rests}
        for domain, rule in by_domain.items():
            if domain in solved:
                own = self.domains.setdefault(domain, DomainCooldown())
                for order, problem_id in solved[domain]:
                    own.note(order, problem_id, rule, version=version)
        for domain, own in self.domains.items():
            resting = own.resting.items() if domain in by_domain else ()
            own.resting = {name: rest for name, rest in resting if rest.turns or version < rest.until}

    def choose(self, index: int, draw: Callable[[int], Problem], *, version: int, frontier: int) -> Problem:
        """Return the problem of prompt order `index`.

        Args:
            draw: given a number of turns, returns the problem of the order's domain that comes this many turns later
                than the order's own turn.
            frontier: all orders below this index have ended, so records of their skipped turns are dropped.
        """
        problem = draw(0)
        own = self.domains.get(problem.domain)
        is_first, self.drawn = index >= self.drawn, max(self.drawn, index + 1)
        if own is None:
            return problem
        ahead = before = own.ahead(index)
        problem = draw(ahead) if ahead else problem
        if not is_first:
            return problem
        while own.resting and own.pass_over(problem.problem_id, version=version):
            if ahead - before == MOST_PASSED:
                own.nothing_else += 1
                break
            ahead += 1
            problem = draw(ahead)
        if ahead > before:
            own.passed_since += ahead - before
            own.passed.append((index, ahead))
            while len(own.passed) > 1 and own.passed[1][0] <= frontier:
                own.passed.pop(0)
        return problem

    def take_figures(self) -> dict[str, dict[str, float]]:
        """Return by domain the number of resting problems, and the number of turns skipped since the last call."""
        figures = {}
        for domain, own in self.domains.items():
            figures[domain] = {"resting": float(len(own.resting)), "passed_over": float(own.passed_since)}
            if own.nothing_else:
                figures[domain]["nothing_else"] = float(own.nothing_else)
            own.passed_since = own.nothing_else = 0
        return figures
