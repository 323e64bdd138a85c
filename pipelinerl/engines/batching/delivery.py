"""What a loop that samples tells the event loop: the news of one step, at most one delivery per request.

Promises: the text of a streamed token is certain (nothing of a stop string, no half character); whatever ended a
sample, its last news says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from inference_contract.errors import ContractError, NotFinite
from inference_contract.schemas import FinishReason
from pipelinerl.engines.batching.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one step added to one sample of a streamed request; `token_id` is None when it ended without a token."""

    index: int
    text: str
    token_id: int | None
    logprob: float
    version: int
    finish_reason: FinishReason | None


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
