"""`TrackioTracker`: a run of trackio, on this machine or on a space of the Hugging Face hub, through its own package.

trackio keeps every row that it is told. Of a run that goes on from a checkpoint the steps that are taken again are not
told again, nor are their evaluations: the first stay. After a kill the rows of the last half second may be there twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun


@final
class TrackioTracker:
    """One run of trackio: the newest of its name where there is a bookmark, else one of its own.

    The bookmark holds, of each sort of figures, the newest step that was told.
    """

    def __init__(
        self, run: TrackedRun, bookmark: Bookmark | None, *, project: str, space_id: str | None, trackio: Any
    ) -> None:
        """`trackio` is the package. Raises OSError where it cannot begin."""
        self._newest: dict[str, int] = dict((bookmark or {}).get("newest", {}))
        self._run = trackio.init(
            project=project,
            name=run.name,
            space_id=space_id,
            config=dict(run.recipe),
            resume="never" if bookmark is None else "allow",
        )

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """A row; trackio has a time of its own for it."""
        sort = _sort_of(figures)
        if step > self._newest.get(sort, -1):
            self._run.log(dict(figures), step=step)
            self._newest[sort] = step

    def rewind(self, step: int) -> None:
        """Nothing: trackio has no way to take rows back."""

    def flush(self) -> Bookmark:
        """Its package sends on a thread of its own."""
        return {"newest": dict(self._newest)}

    def close(self) -> None:
        """Wait for what is to be sent, as long as trackio does."""
        self._run.finish()


def _sort_of(figures: Mapping[str, float]) -> str:
    """The evaluation set that they are of, or nothing where they are of a step."""
    name = next(iter(figures))
    return name.rpartition("/")[0] if name.startswith("eval/") else ""
