"""`SampleLoop`: the one seam between requests and whatever samples them.

`DecodeLoop` is our own, over a `ModelRunner`; an engine that batches by itself (vLLM) brings its own and gets chat,
streaming, text, stop strings and weight updates from `BatchingEngine`. A loop works on a thread of its own and promises
what `DecodeLoop` does: every request and every commit is answered whatever ends it, results leave through `deliver`,
and each token is marked with the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.delivery import Delivery, LoopTotals
from pipelinerl.engines.batching.sequence import Request


class ServedModel(Protocol):
    """A loaded model as its server sees it; every `ModelRunner` is one."""

    @property
    def slots(self) -> int:
        """Most sequences that run at once."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt included."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def layout(self) -> WeightLayout:
        """The parameters in the order in which their bytes lie in `staging`."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of keys and values."""
        ...

    def staging(self) -> Any:
        """The buffer for the next weights: flat uint8 [layout.num_bytes], not read until a commit."""
        ...

    def finish_staging(self) -> None:
        """Make of the filled `staging` what will be served; called beside sampling, before each commit."""
        ...


class SampleLoop(Protocol):
    """Samples requests beside the event loop, which calls these methods; none of them blocks but `stop`."""

    @property
    def totals(self) -> LoopTotals:
        """Counts since the start."""
        ...

    @property
    def serving(self) -> tuple[int, int]:
        """(epoch, version) of the weights that sample."""
        ...

    @property
    def is_alive(self) -> bool:
        """Returns whether it runs, and will go on."""
        ...

    @property
    def num_running(self) -> int:
        """Samples that run."""
        ...

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        ...

    def start(self) -> Future[ServedModel]:
        """Begin; the future is done when the model is loaded."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """End after the current step. Returns whether it has ended in time."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest`, `Overloaded` or `EngineStopped`."""
        ...

    def cancel(self, request: Request) -> None:
        """Nobody waits for `request` any more; nothing is delivered."""
        ...

    def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> Future[float]:
        """Serve the staged weights from some step on; the future carries the pause in seconds.

        Raises:
            EngineStopped; UpdateInProgress, when another commit has not happened yet.
        """
        ...


#: Builds a loop that gives its news to the function it is called with.
LoopBuilder = Callable[[Callable[[list[Delivery]], None]], SampleLoop]
