"""What becomes of a group that a group baseline can learn nothing from: an algorithm says it (DAPO), or a recipe."""

from __future__ import annotations

from enum import StrEnum


class NoSignal(StrEnum):
    """What becomes of a group whose rewards are all equal."""

    TRAIN = "train"
    """It counts as part of its step, which therefore stands for the problems as they came."""
    FILTER = "filter"
    """It is dropped and the step waits for another: dynamic sampling (DAPO §3.2)."""
