"""`SampleLoop`: the interface of the component that samples answers to requests.

`DecodeLoop` is this project's own loop. An engine that batches by itself (vLLM) brings its own loop and gets chat,
streaming, text, stop strings and weight updates from `BatchingEngine`. A loop runs on its own thread and gives the
guarantees of `DecodeLoop`: every request and every commit is answered, however the loop ends, and each token is marked
with the weights that sampled it.

A loop delivers the results of one step at a time, at most one `Delivery` per request. The text of a streamed token is
final: it holds no part of a stop string and no incomplete character. The last delivery of a sample has its finish
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Delivery, Request
from trainer_contract.types import Experts

#: (trainer epoch, version) of the weights in a model directory, which an engine serves until its first update.
UNTRAINED: Final = (0, 0)


@dataclass(slots=True)
class LoopTotals:
    """Counts since the loop started; the loop's thread writes them, any thread may read them."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished_sequences: int = 0
    aborted_sequences: int = 0
    decode_steps: int = 0
    occupied_slot_steps: int = 0
    preemptions: int = 0
    """Preemptions of running samples because the cache had no room for the next token."""
    busy_s: float = 0.0
    """Seconds spent on work: prompts, decode steps and commits."""


class RouteLog(Protocol):
    """The experts that a mixture-of-experts model chose in its last forward pass, recorded while `is_on` is true."""

    is_on: bool
    decoded: Experts
    """The experts [B, layers, top_k] of the last decode step, chosen for the token that each row was fed."""
    prefilled: list[Experts]
    """The experts of each prompt in the last prefill; one array [tokens, layers, top_k] per prompt."""


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The blocks of a paged cache, of `size` tokens each.

    Attributes:
        free: blocks that sequences may still take, including blocks that only keep prompts for reuse.
        reused_tokens: number of prompt tokens, since the start, whose keys and values were found in the cache.
        most_slots: the most slots that a prompt takes in layers with a sliding window, besides one for each sequence;
            None without such layers. Of these slots, `free_slots` are free.
    """

    blocks: int
    free: int
    size: int
    reused_tokens: int
    most_slots: int | None = None
    free_slots: int = 0


class ServedModel(Protocol):
    """Interface between a loaded model and the engine that serves it; every `ModelRunner` satisfies it."""

    @property
    def slots(self) -> int:
        """The maximum number of sequences that run at once."""
        ...

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a sequence, prompt included."""
        ...

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; token ids are below it."""
        ...

    @property
    def layout(self) -> WeightLayout:
        """The parameters in the order of their bytes in `staging`."""
        ...

    @property
    def cache_bytes(self) -> int:
        """The size of the cache of keys and values."""
        ...

    @property
    def room(self) -> CacheRoom | None:
        """The blocks of a paged cache; None if the cache has room for the whole context of every sequence."""
        ...

    @property
    def route_log(self) -> RouteLog | None:
        """The log of the model's expert routers; None if the model has no routers or cannot report their choices."""
        ...

    @property
    def scorer(self) -> Callable[[list[int], float], list[float]] | None:
        """Function (tokens, temperature) → log-probs of a prompt, to call on the loop's thread; None if unsupported."""
        ...

    def staging(self) -> Any:
        """Return the buffer for the next weights, flat uint8 [layout.num_bytes], not served until a commit."""
        ...

    def finish_staging(self) -> None:
        """Convert the filled `staging` to the form that is served; called before a commit, while sampling continues."""
        ...


class SampleLoop(Protocol):
    """Samples answers to requests on its own thread. The event loop calls these methods; only `stop` blocks."""

    totals: LoopTotals
    """Counts since the loop started."""
    serving: tuple[int, int]
    """The (epoch, version) of the weights that sample now."""

    @property
    def is_alive(self) -> bool:
        """True if the loop runs and is not stopping."""
        ...

    @property
    def num_running(self) -> int:
        """The number of samples that are being sampled now."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait because `slots` others are running."""
        ...

    def start(self) -> Future[ServedModel]:
        """Start the loop; the future completes when the model is loaded."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """End the loop after the current step; return whether it ended in time."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest`, `Overloaded` or `EngineStopped`."""
        ...

    def cancel(self, request: Request) -> None:
        """Abandon `request`; nothing more is delivered."""
        ...

    def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> Future[float]:
        """Serve the staged weights; return a future of the pause (s). Raises `EngineStopped` or `UpdateInProgress`."""
        ...


#: Builds a sample loop that passes its results to the given function.
LoopBuilder = Callable[[Callable[[list[Delivery]], None]], SampleLoop]
