"""`Pages`: the runs that a server shows, each with its steering, and what all its routes share."""

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

#: Whether a controller answers is asked so often while somebody listens.
STATE_S: Final = 2.0

#: Which of the runs a question is about.
RunNumber = Annotated[int, Query(alias="run", ge=0, le=10_000)]


def _looks_only(request: Request) -> bool:
    return bool(getattr(request.state, "looks_only", False))


#: Whether the request comes by a link that only looks.
LooksOnly = Annotated[bool, Depends(_looks_only)]
#: A name that a question filters by.
Name = Annotated[str | None, Query(max_length=500)]
#: A step, or a version.
StepNumber = Annotated[int | None, Query(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class Watched:
    """One run: what is read of it, and the way to its controller."""

    run: WatchedRun
    steering: Steering


@final
class Pages:
    """All runs of one server."""

    def __init__(self, runs: Sequence[WatchedRun], *, read_only: bool) -> None:
        self.all = tuple(Watched(run, Steering(run.run_dir, read_only)) for run in runs)
        self._noted_at = -math.inf

    def of(self, number: int) -> Watched:
        """The run of that number; a question about another is refused."""
        if number >= len(self.all):
            raise HTTPException(404, f"runs are 0 to {len(self.all) - 1}, got {number}")
        return self.all[number]

    @property
    def states_are_old(self) -> bool:
        """Has nobody asked for a while whose controllers answer?"""
        return time.monotonic() - self._noted_at >= STATE_S

    def note_states(self) -> None:
        """Ask whose controllers answer."""
        self._noted_at = time.monotonic()
        for watched in self.all:
            over = bool(watched.run.view.state)
            watched.run.note_state(answers=not over and watched.steering.status(max_age_s=STATE_S) is not None)

    def close(self) -> None:
        """Close what is open to the controllers."""
        for watched in self.all:
            watched.steering.close()


def answer(value: Any) -> Response:
    """Plain values as JSON, in which NaN is null."""
    return Response(as_json(value), media_type="application/json")
