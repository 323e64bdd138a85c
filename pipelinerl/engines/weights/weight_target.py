"""`WeightTarget`: the weights of an engine, as seen by whoever receives new ones."""

from __future__ import annotations

from typing import Any, Protocol

from inference_contract.weights import OnUpdate, WeightLayout


class WeightTarget(Protocol):
    """Two buffers and a swap: one that serves, one that is filled meanwhile."""

    @property
    def layout(self) -> WeightLayout:
        """The model's parameters in the order in which they are received."""
        ...

    def staging(self) -> Any:
        """Flat uint8 [layout.num_bytes], numpy or torch, that the model does not read until `commit`."""
        ...

    def finish_staging(self) -> None:
        """`staging` is filled: whatever it takes to make `commit` quick. Called on the receiving thread."""
        ...

    async def commit(self, *, version: int, epoch: int, digest: str, on_update: OnUpdate) -> float:
        """Serve what `staging` holds from the next decode step on; returns the pause in seconds.

        A `ContractError` says that the old weights still serve; any other error leaves the engine dirty.
        """
        ...

    def serving(self) -> tuple[int, int]:
        """(epoch, version) of the weights that serve."""
        ...
