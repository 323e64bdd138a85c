"""`SampleLoop`: the one seam between requests and whatever samples them.

`DecodeLoop` is our own, over a `ModelRunner`; an engine that batches by itself (vLLM) brings its own and gets chat,
streaming, text, stop strings and weight updates from `BatchingEngine`. A loop works on a thread of its own and promises
what `DecodeLoop` does: every request and every commit is answered whatever ends it, results leave through `deliver`,
and each token is marked with the weights that sampled it.

What leaves is the news of one step, at most one `Delivery` per request. The text of a streamed token is certain
(nothing of a stop string, no half character); whatever ended a sample, its last news says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from inference_contract.errors import ContractError, NotFinite
from inference_contract.schemas import FinishReason
from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Request, Sequence, TopTokens
from trainer_contract.types import Experts

#: (epoch, version) of the weights of a model directory, which an engine serves until its first update.
UNTRAINED: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one step added to one sample of a streamed request; `token_id` is None when it ended without a token."""

    index: int
    text: str
    token_id: int | None
    logprob: float
    version: int
    finish_reason: FinishReason | None
    routed: Experts | None = None
    """Of the token before it [layers, top_k], where the request asks for it."""
    top: TopTokens | None = None
    """The likeliest tokens in its place, where the request asks for them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """News of one request: streamed tokens, its end (`is_last`), or the error that ended it."""

    request: Request
    tokens: tuple[SampledToken, ...] = ()
    is_last: bool = False
    error: ContractError | None = None


@final
@dataclass(slots=True)
class LoopTotals:
    """Counts since the start; written by the thread, read by anyone."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished_sequences: int = 0
    aborted_sequences: int = 0
    decode_steps: int = 0
    occupied_slot_steps: int = 0
    busy_s: float = 0.0
    """Seconds in which it had work: prompts, decode steps, commits."""


class RouteLog(Protocol):
    """What the routers of a mixture-of-experts model chose in its last forward, while `is_on`."""

    is_on: bool

    @property
    def decoded(self) -> Experts:
        """Of the rows of the last decode step [B, layers, top_k], for the token that each was fed."""
        ...

    @property
    def prefilled(self) -> list[Experts]:
        """Of each prompt of the last prefill [tokens, layers, top_k]."""
        ...


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

    @property
    def route_log(self) -> RouteLog | None:
        """What the model's routers choose; None: it has none, or does not tell."""
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


# --- news of a step -----------------------------------------------------------------------------------------------


def deliveries(streamed: Iterable[tuple[Request, SampledToken]], finished: Iterable[Request]) -> list[Delivery]:
    """One step's news: what it added to streamed requests, and the requests that have ended with it."""
    tokens: dict[str, list[SampledToken]] = {}
    requests: dict[str, Request] = {}
    for request, token in streamed:
        tokens.setdefault(request.request_id, []).append(token)
        requests[request.request_id] = request
    last = {request.request_id: request for request in finished}
    return [Delivery(r, tuple(tokens.get(i, ())), i in last) for i, r in (requests | last).items()]


def sampled(sequence: Sequence) -> tuple[Request, SampledToken]:
    """The last token of a streamed sample, with the text that it made certain."""
    position = len(sequence.token_ids) - 1
    token = SampledToken(
        index=sequence.index,
        text=_certain_text(sequence),
        token_id=sequence.token_ids[position],
        logprob=sequence.logprobs[position],
        version=sequence.version_of(position),
        finish_reason=sequence.finish_reason,
        routed=sequence.routed[position] if sequence.request.tells_routing else None,
        top=sequence.top[position] if sequence.request.num_top else None,
    )
    return sequence.request, token


def aborted(sequence: Sequence) -> tuple[Request, SampledToken]:
    """The end of a streamed sample that was aborted."""
    token = SampledToken(
        index=sequence.index,
        text=_certain_text(sequence),
        token_id=None,
        logprob=0.0,
        version=sequence.newest_version,
        finish_reason=FinishReason.ABORT,
    )
    return sequence.request, token


def refused(sequence: Sequence, serving: tuple[int, int]) -> Delivery:
    """The end of a request, one of whose samples has no finite distribution for its next token.

    Args:
        serving: (epoch, version) of the weights that have none.
    """
    request = sequence.request
    epoch, version = serving
    error = NotFinite(
        f"the model's logits must be finite, got NaN or infinity for token {len(sequence.token_ids)} of choice "
        f"{sequence.index} after a prompt of {len(request.prompt_token_ids)} tokens, with weights {epoch}.{version}; "
        "serve a model that overflows float16 in bfloat16 or float32, or look at the weights"
    )
    return Delivery(request, is_last=True, error=error)


def _certain_text(sequence: Sequence) -> str:
    if sequence.text is None:
        return ""
    if sequence.finish_reason is not None:
        sequence.text.close()
    return sequence.text.take()
