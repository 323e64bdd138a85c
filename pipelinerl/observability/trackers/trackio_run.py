"""`TrackioTracker`: a run of trackio, on this machine or in a Hugging Face space, through trackio's own package.

trackio keeps every row. After a resume from a checkpoint, repeated steps and their evaluations are not logged again;
the first rows stay. After a kill, the rows of the last half second may be there twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun


@final
class TrackioTracker:
    """One run of trackio: the newest of its name if there is a bookmark, else a new one.

    The bookmark holds the newest logged step, separately for training steps and each evaluation set.
    """

    def __init__(
        self, run: TrackedRun, bookmark: Bookmark | None, *, project: str, space_id: str | None, trackio: Any
    ) -> None:
        """Start the run; `trackio` is the package. Raises OSError if that fails."""
        self._newest: dict[str, int] = dict((bookmark or {}).get("newest", {}))
        self._run = trackio.init(
            project=project,
            name=run.name,
            space_id=space_id,
            config=dict(run.recipe),
            resume="never" if bookmark is None else "allow",
        )

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log a row; trackio assigns its own time."""
        sort = _sort_of(figures)
        if step > self._newest.get(sort, -1):
            self._run.log(dict(figures), step=step)
            self._newest[sort] = step

    def rewind(self, step: int) -> None:
        """Do nothing: trackio cannot remove rows."""

    def flush(self) -> Bookmark:
        """Return the bookmark; the package sends on its own thread."""
        return {"newest": dict(self._newest)}

    def close(self) -> None:
        """Wait until trackio has sent everything, as long as its own timeout allows."""
        self._run.finish()


def _sort_of(figures: Mapping[str, float]) -> str:
    """Return `eval/<set>` for figures of an evaluation, an empty string for those of a step."""
    name = next(iter(figures))
    return name.rpartition("/")[0] if name.startswith("eval/") else ""
