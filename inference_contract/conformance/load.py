"""`Load`: samples that are open at any moment until told to end, so that what happens meanwhile happens in flight.

One request, however long, may be over before an update commits: a fast engine samples to its end while the kit waits
for the processor. Several askers that each ask again as soon as they are answered leave no such gap.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final

from inference_contract.conformance.session import Session
from inference_contract.schemas import Choice

_ASKERS: Final = 4


@final
class Load:
    """Asks from several threads while the `with` block runs; `choices` is whole once it has ended.

    `ask` takes a seed and returns the choices of one completion; its first failure is raised where the block ends.
    """

    def __init__(self, session: Session, ask: Callable[[int], list[Choice]]) -> None:
        self.choices: list[Choice] = []
        self._session = session
        self._ask = ask
        self._seeds = itertools.count()
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_ASKERS)]

    def __enter__(self) -> Self:
        before, deadline = self._session.generated_tokens(), time.monotonic() + self._session.timeout_s
        for thread in self._threads:
            thread.start()
        while self._session.generated_tokens() == before and not self._errors and time.monotonic() < deadline:
            time.sleep(0.001)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        deadline = time.monotonic() + self._session.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if error is None:
            if self._errors:
                raise self._errors[0]
            assert not any(thread.is_alive() for thread in self._threads), (
                f"answers must come within {self._session.timeout_s:g} s although the weights changed meanwhile"
            )

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self.choices.extend(self._ask(next(self._seeds)))
        except BaseException as error:
            self._errors.append(error)
