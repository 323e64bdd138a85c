"""`WandbTracker`: a run of Weights & Biases, online or offline, through its own package.

W&B takes steps in rising order alone: of a run that goes on from a checkpoint it keeps what it was told first of the
steps that are taken again. What comes again after a kill it drops for the same reason. An evaluation tells of a version
that training has passed, so it stands in the newest row, with `eval/version` as the axis of its charts. A process of
its package sends and writes, in pieces of 32 KiB: where that is killed, too, the piece is lost. A server that cannot be
reached is tried again by it, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun

_EVALUATIONS: Final = "eval/"
_VERSION: Final = "eval/version"


@final
class WandbTracker:
    """One run of W&B, whose id is in the bookmark, with the newest step that it was told."""

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
        self._newest = int((bookmark or {}).get("step", -1))
        self._run.define_metric(_VERSION, hidden=True)
        self._run.define_metric(f"{_EVALUATIONS}*", step_metric=_VERSION)

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """W&B has one row for a step, and takes none for one that it has passed."""
        if any(name.startswith(_EVALUATIONS) for name in figures):
            self._run.log({**figures, _VERSION: float(step)}, step=max(step, self._newest))
        elif step > self._newest:
            self._run.log({**figures, "time": time}, step=step)
            self._newest = step

    def rewind(self, step: int) -> None:
        """Nothing: W&B keeps the first of two rows of a step."""

    def flush(self) -> Bookmark:
        """Its package writes on a thread of its own, and has taken everything."""
        return {"id": self._run.id, "step": self._newest}

    def close(self) -> None:
        """Wait for what is to be sent, as long as W&B does."""
        self._run.finish()
