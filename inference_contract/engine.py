"""`Engine`: what stands behind the routes. `pipelinerl.engines.http.server` serves anything that satisfies it.

An engine promises: a request accepted is answered or refused with a `ContractError`, also across weight updates; an
update is all or nothing; log-probs and version spans are those of the weights that really sampled each token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from inference_contract.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    EngineMetrics,
    Health,
    ModelCard,
)
from inference_contract.weights import (
    InitProcessGroupRequest,
    ProcessGroupStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)


class Engine(Protocol):
    """An inference engine. Every coroutine raises `inference_contract.errors.ContractError` and nothing else."""

    async def start(self) -> None:
        """Load what is needed and begin to serve; returns when ready."""
        ...

    async def close(self) -> None:
        """Stop; running requests are answered with `EngineStopped`."""
        ...

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """Join the weight group; returns once every rank has joined."""
        ...

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """Run one phase of a weight update."""
        ...

    async def complete(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Sample all choices and answer when the last has ended. Cancelling it frees what it held."""
        ...

    def stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Sample all choices and yield what is new as it comes. Closing the iterator frees what it held."""
        ...

    def model_card(self) -> ModelCard:
        """The served model, its version and layout."""
        ...

    def health(self) -> Health:
        """State without waiting."""
        ...

    def metrics(self) -> EngineMetrics:
        """Load and totals without waiting."""
        ...
