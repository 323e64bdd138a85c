"""Settings for judging programs, as given in a recipe. This module holds values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipelinerl.verifiers.oubliette.checkers import Checker
from pipelinerl.verifiers.oubliette.runs import Tier


class Scoring(StrEnum):
    """The rule that computes the reward from the tests."""

    ALL = "all"
    """1 if every test is passed, else 0."""
    SHARE = "share"
    """The share of tests that are passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRules:
    """Rules for judging programs; a problem may override some of them.

    Attributes:
        tier: the required sandbox; weaker sandboxes are rejected.
        language: language of a code block that names none. languages: languages that are judged.
        time_limit_s: processor time of one test; elapsed time may be twice that plus a second.
        tolerance: of the checker `float`.
        url: of the Oubliette service that runs programs; if empty, this machine runs them.
        key_variable: name of the environment variable that holds the service's token.
        repository: if this machine runs programs, the folder that holds the contents of problems' links.
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
