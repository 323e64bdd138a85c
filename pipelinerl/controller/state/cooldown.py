"""`Cooldown`: problems that were solved are passed over for a while, so that steps go to what still teaches. Pure.

    a group whose answers are all right ─▶ noted ─▶ `times` of them ─▶ the problem rests ─▶ passed over when its turn
    comes, `epochs` times, or until `steps` steps are taken ─▶ asked again

A problem's turn comes once an epoch of its data set. Whoever is passed over gives the turn to the next problem of the
same domain, so that quotas stay exact and no problem of an epoch is left out. A domain whose problems nearly all rest
asks one that does: `MOST_PASSED` are passed at most. What an order asks is decided when it is first issued: `passed`
says how far a domain is ahead from which order on, so an order that is issued again asks the same.

open-instruct's `no_resampling_pass_rate` (Olmo 3) leaves such prompts out for good; RLAX §6.2 filters their groups once
they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import msgspec

from pipelinerl.types import Problem

#: So many problems are passed over for one order.
MOST_PASSED: Final = 1000

#: The orders whose answers were all right, by domain, each with its problem's id.
Solved = Mapping[str, Sequence[tuple[int, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownRule:
    """How long a domain's solved problems rest: for so many of their turns, or so many steps; after `times` groups."""

    epochs: int = 0
    steps: int = 0
    times: int = 1

    @property
    def rests(self) -> bool:
        """Does any problem ever rest?"""
        return self.epochs > 0 or self.steps > 0


class CooldownPeriod(NamedTuple):
    """For how long a problem rests: turns that are left, or the version from which on it is asked again."""

    turns: int
    until: int


class DomainCooldown(msgspec.Struct, kw_only=True):
    """One domain's problems, by id."""

    solved: dict[str, list[int]] = {}
    """Orders whose answers were all right, of problems that do not rest yet."""
    resting: dict[str, CooldownPeriod] = {}
    passed: list[tuple[int, int]] = []
    """(order, turns): from that order on, so many turns in all were passed over; the oldest first."""
    passed_since: int = 0
    """Turns that were passed over since the last step."""
    nothing_else: int = 0
    """Orders since the last step that asked a resting problem, since nearly all rest."""

    def ahead(self, index: int) -> int:
        """Turns that were passed over before order `index`, and for it."""
        return next((turns for since, turns in reversed(self.passed) if since <= index), 0)

    def note(self, order: int, problem_id: str, rule: CooldownRule, *, version: int) -> None:
        """All answers of an order were right; the same order counts once."""
        if problem_id in self.resting:
            return
        orders = self.solved.setdefault(problem_id, [])
        if order not in orders:
            orders.append(order)
        if len(orders) >= rule.times:
            del self.solved[problem_id]
            self.resting[problem_id] = CooldownPeriod(rule.epochs, version + rule.steps if rule.steps else 0)

    def pass_over(self, problem_id: str, *, version: int) -> bool:
        """Is the problem, whose turn it is, passed over?"""
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


@final
class Cooldown(msgspec.Struct, kw_only=True):
    """What is known of solved problems, by domain; `drawn` is the first order that was never drawn."""

    drawn: int = 0
    domains: dict[str, DomainCooldown] = {}

    def note(self, solved: Solved, rules: Mapping[str, CooldownRule], *, version: int) -> None:
        """Groups whose answers were all right. In a domain without a rule, as a recipe's former one, nothing rests."""
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
        """The problem of order `index`.

        Args:
            draw: the problem of the order's domain that comes so many turns after the order's own.
            frontier: every order below has ended, and is never issued again.
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
            own.passed = _still_needed([*own.passed, (index, ahead)], frontier)
        return problem

    def take_figures(self) -> dict[str, dict[str, float]]:
        """By domain: problems that rest, and turns passed over since the last call."""
        figures = {}
        for domain, own in self.domains.items():
            figures[domain] = {"resting": float(len(own.resting)), "passed_over": float(own.passed_since)}
            if own.nothing_else:
                figures[domain]["nothing_else"] = float(own.nothing_else)
            own.passed_since = own.nothing_else = 0
        return figures


def _still_needed(passed: Iterable[tuple[int, int]], frontier: int) -> list[tuple[int, int]]:
    """Without what only orders that have ended were drawn by."""
    kept = list(passed)
    while len(kept) > 1 and kept[1][0] <= frontier:
        kept.pop(0)
    return kept
