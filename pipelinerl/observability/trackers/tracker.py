"""`Tracker`: where figures of a run go, as the feed needs it; and which trackers there are.

A tracker is opened with what its `flush` returned last, in whatever earlier process that was, and goes on in the same
run of its own. What was logged after that flush may come again: a tracker that can takes care that it is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

#: What a tracker needs to go on; plain JSON, kept by the feed with its position.
Bookmark = dict[str, Any]


class Tracker(Protocol):
    """A run in some tracker. Every method may block, and may raise OSError: then it is opened anew, later."""

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Figures of a step, by the names of `metric_names`, at `time` (Unix seconds)."""
        ...

    def rewind(self, step: int) -> None:
        """The run begins again with `step`: of that step and later ones nothing that was logged counts."""
        ...

    def flush(self) -> Bookmark:
        """Make durable what was logged; with what this returns a later process goes on from here."""
        ...

    def close(self) -> None:
        """Free its files and threads; closing twice is harmless."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of the run: its name, its directory, and its recipe without secrets."""

    name: str
    directory: Path
    recipe: Mapping[str, Any]


#: Opens a tracker, anew or at a bookmark.
OpenTracker = Callable[[Bookmark | None], Tracker]

#: The package that a tracker needs, and how to install it, by the tracker's key in `[trackers]`.
PACKAGES: Final = {
    "tensorboard": ("tensorboardX", "pip install 'pipelinerl[track]'"),
    "wandb": ("wandb", "pip install wandb"),
    "trackio": ("trackio", "pip install trackio"),
}


def missing_package(tracker: str) -> str:
    """A sentence when the tracker's package is not installed, else nothing."""
    package, install = PACKAGES[tracker]
    return "" if find_spec(package) is not None else f"trackers.{tracker} needs the package {package}: {install}"
