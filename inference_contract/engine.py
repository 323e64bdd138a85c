"""`Engine`, the interface behind the routes; `pipelinerl.engines.http.server` serves any class that satisfies it.

An engine guarantees that:

- every accepted request is answered or fails with a `ContractError`, also across weight updates;
- a weight update is applied completely or not at all;
- log-probs and version spans belong to the weights that sampled each token.
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
    """An inference engine. Its coroutines raise only `inference_contract.errors.ContractError`."""

    async def start(self) -> None:
        """Load the model and start serving; return when ready."""
        ...

    async def close(self) -> None:
        """Stop; running requests fail with `EngineStopped`."""
        ...

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """Join the weight group; return once every rank has joined."""
        ...

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """Run one phase of a weight update."""
        ...

    async def complete(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Sample all choices and return when the last has finished. Cancellation frees the request's resources."""
        ...

    def stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Sample all choices and yield new tokens as they arrive. Closing the iterator frees the resources."""
        ...

    def model_card(self) -> ModelCard:
        """Return the served model, its version and its weight layout."""
        ...

    def health(self) -> Health:
        """Return the engine's state without waiting."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return load and totals without waiting."""
        ...
