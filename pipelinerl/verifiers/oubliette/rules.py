"""How programs are judged, as a recipe says it: values alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipelinerl.verifiers.oubliette.checkers import Checker
from pipelinerl.verifiers.oubliette.runs import Tier


class Scoring(StrEnum):
    """What the reward is."""

    ALL = "all"
    """1 where every test is passed, else 0."""
    SHARE = "share"
    """The share of tests that are passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRules:
    """How programs are judged, where a problem says nothing else.

    Attributes:
        tier: the sandbox; none below it is taken.
        language: of a block that names none. languages: those that are judged.
        time_limit_s: processor time of one test; on the clock it may take twice that and a second.
        tolerance: of the checker `float`.
        url: of the Oubliette service that runs programs; none: this machine does. key_variable: names the environment
            variable that holds its token.
        repository: the folder into which the links of problems lead, where this machine runs programs.
    """

    tier: Tier = Tier.DEFAULT
    language: str = "python"
    languages: tuple[str, ...] = ("python",)
    scoring: Scoring = Scoring.ALL
    checker: Checker = Checker.TOKENS
    tolerance: float = 1e-6
    time_limit_s: float = 4.0
    memory_bytes: int = 512 << 20
    url: str = ""
    key_variable: str = ""
    repository: str = ""
