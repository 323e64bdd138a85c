"""`Tracker`: the interface of trackers to the feed; and the packages that each tracker needs.

A tracker is opened with the bookmark of its last `flush`, possibly in another process, and continues the same tracker
run. Rows logged after that flush may be logged again; a tracker should avoid duplicates if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

#: State from which a tracker can continue: plain JSON, stored by the feed with its position.
Bookmark = dict[str, Any]


class Tracker(Protocol):
    """A run in a tracker. Every method may block, or raise OSError; the feed then reopens the tracker later."""

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log figures of a step, named as in `metric_names`, at `time` (Unix seconds)."""
        ...

    def rewind(self, step: int) -> None:
        """Discard this step and later ones; the run repeats them."""
        ...

    def flush(self) -> Bookmark:
        """Make logged rows durable, and return a bookmark from which a later process can continue."""
        ...

    def close(self) -> None:
        """Free files and threads; closing twice is harmless."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Information on the run for a tracker: its name, its directory, and its recipe without secrets."""

    name: str
    directory: Path
    recipe: Mapping[str, Any]


#: Opens a tracker, new or at a bookmark.
OpenTracker = Callable[[Bookmark | None], Tracker]

#: The package that each tracker needs and how to install it, by the tracker's key in `[trackers]`.
PACKAGES: Final = {
    "tensorboard": ("tensorboardX", "pip install 'pipelinerl[track]'"),
    "wandb": ("wandb", "pip install wandb"),
    "trackio": ("trackio", "pip install trackio"),
}


def missing_package(tracker: str) -> str:
    """Return an error message if the tracker's package is not installed, else an empty string."""
    package, install = PACKAGES[tracker]
    return "" if find_spec(package) is not None else f"trackers.{tracker} needs the package {package}: {install}"
