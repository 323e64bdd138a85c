"""`TrackioTracker`: a run of trackio, on this machine or on a space of the Hugging Face hub, through its own package.

trackio keeps every row that it is told: after a kill the rows of the last half second may be there twice, and of a run
that goes on from a checkpoint those that are taken again are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun


@final
class TrackioTracker:
    """One run of trackio, told from others by its name."""

    def __init__(self, run: TrackedRun, *, project: str, space_id: str | None, trackio: Any) -> None:
        """`trackio` is the package. Raises OSError where it cannot begin."""
        self._run = trackio.init(
            project=project, name=run.name, space_id=space_id, config=dict(run.recipe), resume="allow"
        )

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """A row."""
        self._run.log({**figures, "time": time}, step=step)

    def rewind(self, step: int) -> None:
        """Nothing: trackio has no way to take rows back."""

    def flush(self) -> Bookmark:
        """Its package sends on a thread of its own."""
        return {}

    def close(self) -> None:
        """Wait for what is to be sent, as long as trackio does."""
        self._run.finish()
