"""`Publisher`: takes the trainer's weights to the engines. `broadcast` pushes; a parameter server lets engines pull.

A publication is all or nothing per engine, and its report says for each engine what happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

from inference_contract.weights import DType, OnUpdate, ParameterSpec, WeightLayout
from pipelinerl.errors import ReachedNoEngine, UpdateError
from trainer_contract.types import ParameterInfo

#: Full parameters in layout order; called once per attempt, since an attempt consumes it.
WeightSource = Callable[[], Iterator[tuple[str, Any]]]


def wire_layout(infos: Iterable[ParameterInfo]) -> WeightLayout:
    """The layout of a weight update that carries `infos` in their order.

    Raises:
        UpdateError: a parameter has a dtype that the contract does not carry.
    """
    parameters = []
    for info in infos:
        if info.dtype not in set(DType):
            known = ", ".join(DType)
            raise UpdateError(f"parameter {info.name!r} must have one of the dtypes {known}, got {info.dtype!r}")
        parameters.append(ParameterSpec(name=info.name, shape=info.shape, dtype=DType(info.dtype)))
    return WeightLayout(parameters=tuple(parameters))


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

    For those in `permanent`, which have failed, no retry mends it. Those in `blameless` failed because of others.
    """

    version: int
    epoch: int
    digest: str
    send_s: float
    total_s: float
    pauses_s: Mapping[str, float]
    failed: Mapping[str, str]
    permanent: frozenset[str] = frozenset()
    blameless: frozenset[str] = frozenset()

    @classmethod
    def failure(cls, publication: Publication, error: UpdateError) -> Self:
        """The report of a publication that reached no engine."""
        known = error if isinstance(error, ReachedNoEngine) else ReachedNoEngine("", failed={})
        return cls(
            version=publication.version,
            epoch=publication.epoch,
            digest="",
            send_s=0.0,
            total_s=0.0,
            pauses_s={},
            failed=dict.fromkeys(publication.engines, str(error)) | dict(known.failed),
            permanent=known.permanent,
            blameless=known.blameless,
        )


@final
@dataclass(slots=True)
class PublicationProgress:
    """One publication while it runs: who is still to be served, and what became of the others.

    Attributes:
        targets: engines (base URLs) that are still to be served.
        deadline: by `time.monotonic`, as `began` is.
        broke: whether a broadcast of this publication has broken off already.
        raised: whether it went above a generation of the group that was none of this trainer's.
    """

    publication: Publication
    targets: list[str]
    deadline: float
    began: float
    send_s: float = 0.0
    digest: str = ""
    broke: bool = False
    raised: bool = False
    pauses_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    permanent: set[str] = field(default_factory=set)
    blameless: set[str] = field(default_factory=set)

    @property
    def remaining_s(self) -> float:
        """Time until the deadline, and enough for a last answer once it has passed."""
        return max(self.deadline - time.monotonic(), 0.05)

    def drop(self, failures: Mapping[str, str]) -> None:
        """Serve these no more in this publication."""
        self.failed |= failures
        self.targets = [url for url in self.targets if url not in failures]

    def report(self) -> PublishReport:
        """The outcome so far."""
        return PublishReport(
            version=self.publication.version,
            epoch=self.publication.epoch,
            digest=self.digest,
            send_s=self.send_s,
            total_s=time.monotonic() - self.began,
            pauses_s=self.pauses_s,
            failed=self.failed,
            permanent=frozenset(self.permanent & self.failed.keys()),
            blameless=frozenset(self.blameless & self.failed.keys()),
        )


class Publisher(Protocol):
    """Takes weights to engines."""

    async def publish(self, publication: Publication) -> PublishReport:
        """Publish; engines that fail are reported, not raised. Raises `UpdateError` when none is served."""
        ...

    async def close(self) -> None:
        """Leave the group and free buffers."""
        ...
