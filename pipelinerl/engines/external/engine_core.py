"""`EngineCore`: a sampler in another process that a `CoreLoop` drives: vLLM's core, or a separate server.

A core does its own batching. It must report which weights sampled each token, but may report it late.
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
    """The results of one step for one sample.

    Attributes:
        token_ids, logprobs: the tokens that follow those of earlier steps, all sampled by one version.
        arrived: the number of tokens that the core has sampled since the last step. Their ids may be reported in this
            step or in a later one.
        top: for each of `token_ids` the likeliest tokens at its position, at least as many as the request wants.
        ended: the core stops sampling this sample, for any reason.
    """

    sample_id: str
    token_ids: Items[int]
    logprobs: Items[float]
    arrived: int
    ended: bool
    top: Items[TopTokens] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step.

    `serving` is (epoch, version) of the weights that sampled the step's tokens; None for a step without tokens.
    """

    serving: tuple[int, int] | None
    samples: list[Sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreModel:
    """The model that a core serves; satisfies `ServedModel`. The core reads the staged weights directly."""

    options: EngineOptions
    vocab_size: int
    layout: WeightLayout
    cache_bytes: int
    staged: Any

    @property
    def slots(self) -> int:
        """The number of samples that the core works on at once."""
        return self.options.slots

    @property
    def context_length(self) -> int:
        """The most tokens of a sequence, prompt included."""
        return self.options.context_length

    @property
    def room(self) -> None:
        """Always None: a core manages its cache itself."""
        return None

    @property
    def route_log(self) -> None:
        """Always None: cores do not report the choices of routers."""
        return None

    @property
    def scorer(self) -> None:
        """Always None: cores are not asked for the log-probs of given tokens."""
        return None

    def staging(self) -> Any:
        """Return the staging buffer: u8 [layout.num_bytes], a torch tensor on the host."""
        return self.staged

    def finish_staging(self) -> None:
        """Do nothing: the core reads the bytes at the commit."""


class EngineCore(Protocol):
    """A running core, used from the event loop that started it. If any method raises, the engine ends."""

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` if this core cannot serve the request; any thread may call this."""
        ...

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        """Begin the samples of one request. Samples of the same prompt and `salt` share their prompt's cache."""
        ...

    async def abort(self, sample_ids: list[str]) -> None:
        """End these samples and free their memory; they produce no more output."""
        ...

    async def next_step(self) -> Step:
        """Return the next step. If it has already arrived, return it without yielding to the event loop."""
        ...

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; `on_update` selects whether running samples are kept, aborted or awaited first."""
        ...

    async def resume(self) -> None:
        """Resume sampling after a pause."""
        ...

    async def load_staged(self, epoch: int, version: int) -> None:
        """Load the staged weights as this version, which samples from the next step on; the core must be paused."""
        ...

    async def forget_cache(self) -> None:
        """Drop the cache of keys and values; when the core resumes, it recomputes prompts and sampled tokens."""
        ...

    async def close(self) -> None:
        """End the core, or detach from it if this project did not start it."""
        ...


def refuse_beyond(request: Request, offered: frozenset[str], engine: str) -> None:
    """Raise `InvalidRequest` if the request uses a sampling field that is not in `offered`; the message names
    `engine`.
    """
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
    """Return the name by which the core knows a sample; it never changes."""
    return f"{sequence.request.request_id}-{sequence.index}"


def label_of(epoch: int, version: int) -> str:
    """Return a version's label, `epoch.version`, for cores that name versions by text."""
    return f"{epoch}.{version}"


def named_by(label: str) -> tuple[int, int]:
    """Return the (epoch, version) of a label. Raises `ValueError` for a label that `label_of` did not make."""
    epoch, _, version = label.partition(".")
    return int(epoch), int(version)
