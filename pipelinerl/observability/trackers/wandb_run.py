"""`WandbTracker`: a run of Weights & Biases, online or offline, through W&B's own package.

- W&B accepts steps in rising order only. After a resume from a checkpoint it keeps the first rows of repeated steps;
  repeated rows after a kill are dropped likewise.
- An evaluation covers a version that training has already passed, so it goes into the newest row. `eval/version` is the
  axis of its charts.
- The package sends and writes in a process of its own, in pieces of 32 KiB. If that process is killed, a piece is lost.
- The package retries an unreachable server; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, final

from pipelinerl.observability.trackers.tracker import Bookmark, TrackedRun

_EVALUATIONS: Final = "eval/"
_VERSION: Final = "eval/version"


@final
class WandbTracker:
    """One run of W&B. The bookmark holds its id and the newest logged step."""

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
        """Start or resume the run; `wandb` is the package. Raises OSError if that fails."""
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
        """Log a row. W&B has one row per step and rejects steps that it has passed."""
        if any(name.startswith(_EVALUATIONS) for name in figures):
            self._run.log({**figures, _VERSION: float(step)}, step=max(step, self._newest))
        elif step > self._newest:
            self._run.log({**figures, "time": time}, step=step)
            self._newest = step

    def rewind(self, step: int) -> None:
        """Do nothing: W&B keeps the first of two rows of a step."""

    def flush(self) -> Bookmark:
        """Return the bookmark; the package has taken all rows and writes on its own thread."""
        return {"id": self._run.id, "step": self._newest}

    def close(self) -> None:
        """Wait until W&B has sent everything, as long as its own timeout allows."""
        self._run.finish()
