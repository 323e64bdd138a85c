"""`Load`, continuous sampling load for checks that need requests in flight.

A single request, however long, may finish before an update commits: a fast engine completes it while the kit waits for
the CPU. Several threads that each send a new request after every answer leave no such gap.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Final, Self, final

import httpx

from inference_contract.conformance.session import Session

_ASKERS: Final = 4


@final
class Load:
    """Sends requests from several threads while the `with` block runs; `answers` is complete after the block.

    `ask` takes a seed and returns an unparsed response, since parsing is slower than a fast engine's sampling. The
    first failure is raised when the block ends.
    """

    def __init__(self, session: Session, ask: Callable[[int], httpx.Response]) -> None:
        self.answers: list[httpx.Response] = []
        self._sampled_before = 0.0
        self._session = session
        self._ask = ask
        self._seeds = itertools.count()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(_ASKERS)
        self._asking: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._sampled_before, deadline = self._session.generated_tokens(), time.monotonic() + self._session.timeout_s
        self._asking = [self._threads.submit(self._run) for _ in range(_ASKERS)]
        while not self.sampled() and time.monotonic() < deadline:
            if any(request.done() for request in self._asking):
                break  # A request failed; __exit__ raises its error.
            time.sleep(0.001)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        done, late = wait(self._asking, self._session.timeout_s)
        self._threads.shutdown(wait=False)
        if error is None:
            assert not late, f"answers must arrive within {self._session.timeout_s:g} s although the weights changed"
            for request in done:
                request.result()

    def sampled(self) -> float:
        """Return the tokens sampled since this load began, including those of unfinished answers."""
        return self._session.generated_tokens() - self._sampled_before

    def _run(self) -> None:
        while not self._ended.is_set():
            self.answers.append(self._ask(next(self._seeds)))
