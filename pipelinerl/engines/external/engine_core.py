"""`EngineCore`: what samples in another process, as a `CoreLoop` drives it: vLLM's core, or a server apart.

A core batches by itself. What it must be able to say is which weights sampled a token; it may say so late.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from inference_contract.errors import InvalidRequest
from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Request, Sequence, TopTokens
from pipelinerl.engines.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step brought of one sample.

    Attributes:
        token_ids, logprobs: the tokens that follow those of the steps before; all sampled by one version.
        arrived: tokens that the core has sampled since the last step, which are among these or follow in a later step.
        top: of each of these tokens the likeliest ones in its place, at least as many as the request wants.
        ended: the core will not go on with it, whatever the reason.
    """

    sample_id: str
    token_ids: Items[int]
    logprobs: Items[float]
    arrived: int
    ended: bool
    top: Items[TopTokens] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What a step brought; `serving` is (epoch, version) of the weights that sampled it, None when it has no tokens."""

    serving: tuple[int, int] | None
    samples: list[Sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreModel:
    """The model that a core serves; satisfies `ServedModel`. What is staged, the core can read."""

    options: EngineOptions
    vocab_size: int
    layout: WeightLayout
    cache_bytes: int
    staged: Any

    @property
    def slots(self) -> int:
        """Samples that the core works on at once."""
        return self.options.slots

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return self.options.context_length

    @property
    def route_log(self) -> None:
        """No core is asked what its routers choose."""
        return None

    def staging(self) -> Any:
        """u8 [layout.num_bytes], a torch tensor of the host."""
        return self.staged

    def finish_staging(self) -> None:
        """Nothing to do: the core takes the bytes when they are committed."""


class EngineCore(Protocol):
    """A running core, used from the event loop in which it was started. What its methods raise ends the engine."""

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for what this core cannot do; called on any thread."""
        ...

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        """Begin the samples of one request. Samples of one prompt and one `salt` share their prompt's cache."""
        ...

    async def abort(self, sample_ids: list[str]) -> None:
        """Free what these samples hold; nothing more comes of them."""
        ...

    async def next_step(self) -> Step:
        """Wait for the next step. Those that have come already are answered without a turn of the event loop."""
        ...

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; what runs is kept, ended with `abort`, or awaited first, as `on_update` says."""
        ...

    async def resume(self) -> None:
        """Sample again after a pause."""
        ...

    async def load_staged(self, epoch: int, version: int) -> None:
        """The staged weights sample from the next step on, under this name; the core is paused."""
        ...

    async def forget_cache(self) -> None:
        """Prompts, and what has been sampled, are computed anew when the core resumes."""
        ...

    async def close(self) -> None:
        """End the core, or leave it where it is not ours to end."""
        ...


def refuse_beyond(request: Request, offered: frozenset[str], engine: str) -> None:
    """Raise `InvalidRequest` for a field of sampling that the request uses and `engine` does not offer."""
    change = request.change
    used = {
        "min_p": request.min_p > 0,
        "top_logprobs": request.num_top > 0,
        "logit_bias": change is not None and bool(change.bias),
        "frequency_penalty": change is not None and change.frequency_penalty != 0,
        "presence_penalty": change is not None and change.presence_penalty != 0,
        "response_format": request.response_format is not None,
    }
    for name, is_used in used.items():
        if is_used and name not in offered:
            raise InvalidRequest(f"{name}: {engine} does not offer it; leave it out", param=name)


def sample_id(sequence: Sequence) -> str:
    """The name of a sample, the same for its whole life."""
    return f"{sequence.request.request_id}-{sequence.index}"


def label_of(epoch: int, version: int) -> str:
    """The name of weights, where a core wants text."""
    return f"{epoch}.{version}"


def named_by(label: str) -> tuple[int, int]:
    """(epoch, version) of a label. Raises `ValueError` when it is none of ours."""
    epoch, _, version = label.partition(".")
    return int(epoch), int(version)
