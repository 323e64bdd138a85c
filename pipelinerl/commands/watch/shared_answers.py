"""`SharedAnswers`: what several pages ask at about the same time is worked out once.

An answer that is given a second time says whether more has happened since it was made (`behind`), and whoever asked
then asks again after a while: none stays old because it was shared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from fastapi.responses import Response

from pipelinerl.commands.watch.feed import as_json
from pipelinerl.commands.watch.watched_run import WatchedRun

#: How old an answer may be, in seconds.
_FRESH_S: Final = 1.0
#: Questions whose answers are kept; of more the oldest is forgotten.
_MOST: Final = 32


@dataclass(slots=True)
class _SharedAnswer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    made_at: float = float("-inf")
    place: str = ""
    body: bytes = b""


@final
class SharedAnswers:
    """Used from any thread; of one question one thread works out the answer, and others wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Hashable, _SharedAnswer] = {}

    def of(self, question: Hashable, run: WatchedRun, make: Callable[[], Mapping[str, Any]]) -> Response:
        """The answer as JSON.

        Args:
            question: equal for all who are to have one answer.
            run: what it is about.
            make: works it out; it has a field at least.
        """
        with self._lock:
            kept = self._kept.setdefault(question, _SharedAnswer())
            if len(self._kept) > _MOST:
                del self._kept[next(iter(self._kept))]
        with kept.lock:
            if self._clock() - kept.made_at >= _FRESH_S:
                kept.place = run.feed.place
                kept.body = as_json(make())
                kept.made_at = self._clock()
            behind = b'{"behind":true,' if kept.place != run.feed.place else b'{"behind":false,'
            return Response(behind + kept.body[1:], media_type="application/json")
