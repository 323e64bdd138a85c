"""`WandbTracker`: a run of Weights & Biases, online or offline, through its own package.

W&B takes steps in rising order alone: of a run that goes on from a checkpoint it keeps what it was told first of the
steps that are taken again, and says so in its log. What comes again after a kill it drops for the same reason. Its own
thread sends; a server that cannot be reached is tried again by it, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun


@final
class WandbTracker:
    """One run of W&B, whose id is in the bookmark."""

    def __init__(
        self,
        run: TrackedRun,
        bookmark: Bookmark | None,
        *,
        project: str,
        entity: str | None,
        mode: Literal["online", "offline"],
        wandb: Any,
    ) -> None:
        """`wandb` is the package. Raises OSError where it cannot begin."""
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=run.name,
            id=(bookmark or {}).get("id"),
            resume="allow",
            mode=mode,
            dir=str(run.directory),
            config=dict(run.recipe),
        )

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """W&B has one row for a step."""
        self._run.log({**figures, "time": time}, step=step)

    def rewind(self, step: int) -> None:
        """Nothing: W&B keeps the first of two rows of a step."""

    def flush(self) -> Bookmark:
        """Its package writes on a thread of its own, and has taken everything."""
        return {"id": self._run.id}

    def close(self) -> None:
        """Wait for what is to be sent, as long as W&B does."""
        self._run.finish()
