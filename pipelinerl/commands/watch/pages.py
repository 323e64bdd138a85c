"""`Pages`: the watched runs of a server with their controllers, and helpers that all routes share."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, final

from fastapi import Depends, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.commands.watch.feed import as_json
from pipelinerl.commands.watch.steering import Steering
from pipelinerl.commands.watch.watched_run import WatchedRun

#: Seconds between two polls of the controllers, while a page listens.
STATE_S: Final = 2.0

#: Query parameter with the number of the requested run.
RunNumber = Annotated[int, Query(alias="run", ge=0, le=10_000)]


def _looks_only(request: Request) -> bool:
    return bool(getattr(request.state, "looks_only", False))


#: True if the request comes from a read-only link.
LooksOnly = Annotated[bool, Depends(_looks_only)]
#: Query parameter with a name to filter by.
Name = Annotated[str | None, Query(max_length=500)]
#: Query parameter with a step or a model version.
StepNumber = Annotated[int | None, Query(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class Watched:
    """One run: its files, and the connection to its controller."""

    run: WatchedRun
    steering: Steering


@final
class Pages:
    """All runs of one server."""

    def __init__(self, runs: Sequence[WatchedRun], *, read_only: bool) -> None:
        self.all = tuple(Watched(run, Steering(run.run_dir, read_only)) for run in runs)
        self._noted_at = -math.inf

    def of(self, number: int) -> Watched:
        """Return the run of that number; answer 404 if there is none."""
        if number >= len(self.all):
            raise HTTPException(404, f"runs are 0 to {len(self.all) - 1}, got {number}")
        return self.all[number]

    @property
    def states_are_old(self) -> bool:
        """True if the controllers have not been polled for `STATE_S`."""
        return time.monotonic() - self._noted_at >= STATE_S

    def note_states(self) -> None:
        """Poll all controllers, and record which runs are live."""
        self._noted_at = time.monotonic()
        for watched in self.all:
            over = bool(watched.run.view.state)
            watched.run.note_state(answers=not over and watched.steering.status(max_age_s=STATE_S) is not None)

    def close(self) -> None:
        """Close the connections to the controllers."""
        for watched in self.all:
            watched.steering.close()


def answer(value: Any) -> Response:
    """Return a response with plain values as JSON, NaN as null."""
    return Response(as_json(value), media_type="application/json")
