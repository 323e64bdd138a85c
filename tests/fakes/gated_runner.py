"""A real runner whose decode steps wait for permission, so that a test controls what happens between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from inference_contract.weights import WeightLayout
from pipelinerl.engines.batching.model_runner import EarlyStep, ModelRunner, Prefill, RowState
from pipelinerl.engines.batching.sample_loop import CacheRoom, RouteLog
from pipelinerl.engines.batching.sequence import TopTokens
from tests.patience import PATIENCE_S

DEADLINE_S = PATIENCE_S


@final
class GatedRunner:
    """A runner whose `decode` first waits until `allow` permits the step; `waiting` is true while a step waits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._permits = threading.Semaphore(0)
        self._done = threading.Condition()
        self._free = False
        self.waiting = False
        self.steps = 0
        self.batch_sizes: list[int] = []
        self.log: list[str] = []

    def allow(self, steps: int) -> None:
        """Permit `steps` more decode steps, and return once they are done."""
        target = self.steps + steps
        self._permits.release(steps)
        with self._done:
            assert self._done.wait_for(lambda: self.steps >= target, DEADLINE_S), f"{self.steps} of {target} steps"

    def open(self) -> None:
        """Permit all further decode steps."""
        self._free = True
        self._permits.release()

    @property
    def slots(self) -> int:
        return self._runner.slots

    @property
    def context_length(self) -> int:
        return self._runner.context_length

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def layout(self) -> WeightLayout:
        return self._runner.layout

    @property
    def cache_bytes(self) -> int:
        return self._runner.cache_bytes

    @property
    def route_log(self) -> RouteLog | None:
        return self._runner.route_log

    @property
    def scorer(self) -> Callable[[list[int], float], list[float]] | None:
        return self._runner.scorer

    @property
    def top_logprobs(self) -> Mapping[int, TopTokens]:
        return self._runner.top_logprobs

    @property
    def room(self) -> CacheRoom | None:
        return self._runner.room

    @property
    def early_step(self) -> EarlyStep:
        return self._runner.early_step

    def reserve(self, num_rows: int) -> bool:
        return self._runner.reserve(num_rows)

    def release(self, rows: Sequence[int]) -> None:
        self._runner.release(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.log.append(f"clear rows {list(rows)}")
        self._runner.clear(rows)

    def survives(self, error: Exception) -> bool:
        return self._runner.survives(error)

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        self.log += [f"prefill {len(each.token_ids)} tokens to rows {list(each.rows)}" for each in prefills]
        self._runner.prefill(prefills)

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        self.log.append(f"copy {num_tokens} tokens from row {source} to rows {list(rows)}")
        self._runner.copy_cache(source, rows, num_tokens)

    def place(self, states: Sequence[RowState]) -> None:
        self._runner.place(states)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._runner.move(sources, targets)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        if not self._free:
            self.waiting = not self._permits.acquire(blocking=False)
            assert not self.waiting or self._permits.acquire(timeout=DEADLINE_S), "the test did not allow the next step"
            self.waiting = False
        out = self._runner.decode(num_rows)
        with self._done:
            self.steps += 1
            self.batch_sizes.append(num_rows)
            self._done.notify_all()
        return out

    def staging(self) -> Any:
        return self._runner.staging()

    def finish_staging(self) -> None:
        self._runner.finish_staging()

    def swap(self) -> None:
        self.log.append("swap")
        self._runner.swap()
