"""`Publisher`: takes the trainer's weights to the engines. `broadcast` pushes; a parameter server lets engines pull.

A publication is all or nothing per engine, and its report says for each engine what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.errors import ReachedNoEngine, UpdateError

#: Full parameters in layout order; called once per attempt, since an attempt consumes it.
WeightSource = Callable[[], Iterator[tuple[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What to publish: weights (`epoch`, `version`) of `layout` to `engines` (base URLs)."""

    version: int
    epoch: int
    layout: WeightLayout
    weights: WeightSource
    engines: Sequence[str]
    membership: int
    on_update: OnUpdate = OnUpdate.CONTINUE
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Outcome per engine (base URL): `pauses_s` of those that serve the version now, `failed` with the reason.

    For those in `permanent`, which have failed, no retry mends it.
    """

    version: int
    epoch: int
    digest: str
    send_s: float
    total_s: float
    pauses_s: Mapping[str, float]
    failed: Mapping[str, str]
    permanent: frozenset[str] = frozenset()

    @classmethod
    def failure(cls, publication: Publication, error: UpdateError) -> Self:
        """The report of a publication that reached no engine."""
        reasons = error.failed if isinstance(error, ReachedNoEngine) else {}
        return cls(
            version=publication.version,
            epoch=publication.epoch,
            digest="",
            send_s=0.0,
            total_s=0.0,
            pauses_s={},
            failed=dict.fromkeys(publication.engines, str(error)) | dict(reasons),
            permanent=error.permanent if isinstance(error, ReachedNoEngine) else frozenset(),
        )


class Publisher(Protocol):
    """Takes weights to engines."""

    async def publish(self, publication: Publication) -> PublishReport:
        """Publish; engines that fail are reported, not raised. Raises `UpdateError` when none is served."""
        ...

    async def close(self) -> None:
        """Leave the group and free buffers."""
        ...
