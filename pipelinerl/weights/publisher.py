"""`Publisher`: interface for sending the trainer's weights to engines, by broadcast or through parameter servers.

Each engine either serves the new weights or keeps the old ones; the report states the outcome for each engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

from inference_contract.weights import DType, OnUpdate, ParameterSpec, WeightLayout
from pipelinerl.errors import NotUploaded, ReachedNoEngine, UpdateError
from trainer_contract.types import ParameterInfo

#: Function that returns an iterator over (name, full parameter) in layout order. Each attempt to send calls it, since
#: an iterator can be consumed only once.
WeightSource = Callable[[], Iterator[tuple[str, Any]]]

#: Maximum number of failed engines that an error lists with their reasons.
_LISTED: Final = 8


def wire_layout(infos: Iterable[ParameterInfo]) -> WeightLayout:
    """Return the layout of an update with parameters `infos` in order. Raises UpdateError for an unsupported dtype."""
    parameters = []
    for info in infos:
        if info.dtype not in set(DType):
            known = ", ".join(DType)
            raise UpdateError(f"parameter {info.name!r} must have one of the dtypes {known}, got {info.dtype!r}")
        parameters.append(ParameterSpec(name=info.name, shape=info.shape, dtype=DType(info.dtype)))
    return WeightLayout(parameters=tuple(parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights of (`epoch`, `version`) with the parameters of `layout`, to be sent to `engines` (base URLs)."""

    version: int
    epoch: int
    layout: WeightLayout
    weights: WeightSource
    engines: Sequence[str]
    membership: int
    on_update: OnUpdate = OnUpdate.CONTINUE
    timeout_s: float = 120.0

    @property
    def name(self) -> str:
        return f"{self.epoch}.{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Outcome for each engine, by base URL: engines in `pauses_s` now serve the version, those in `failed` do not.

    `pauses_s` has the seconds for which decoding paused, `failed` the reasons.

    A retry cannot help the failed engines in `permanent`. Those in `blameless` failed only because of other engines.
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
    error: str = ""
    """Why the publication failed as a whole; empty if an engine serves the version."""

    @classmethod
    def failure(cls, publication: Publication, error: UpdateError) -> Self:
        """Return the report of a publication that failed for all engines; for none if nothing was uploaded."""
        known = error if isinstance(error, ReachedNoEngine) else ReachedNoEngine("", failed={})
        asked = () if isinstance(error, NotUploaded) else publication.engines
        return cls(
            version=publication.version,
            epoch=publication.epoch,
            digest="",
            send_s=0.0,
            total_s=0.0,
            pauses_s={},
            failed=dict.fromkeys(asked, str(error)) | dict(known.failed),
            error=str(error),
            permanent=known.permanent,
            blameless=known.blameless,
        )


@dataclass(slots=True)
class PublicationProgress:
    """A publication under way; `broke`: a broadcast failed, `raised`: the generation was raised, once."""

    publication: Publication
    targets: list[str] = field(init=False)
    began: float = field(default_factory=time.monotonic)
    send_s: float = 0.0
    digest: str = ""
    broke: bool = False
    raised: bool = False
    pauses_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    permanent: set[str] = field(default_factory=set)
    blameless: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.targets = list(dict.fromkeys(self.publication.engines))

    @property
    def deadline(self) -> float:
        return self.began + self.publication.timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; after the deadline, just enough time for one last answer."""
        return max(self.deadline - time.monotonic(), 0.05)

    def drop(self, failures: Mapping[str, str]) -> None:
        """Record the engines in `failures` (reasons by URL) as failed, and do not try to serve them any more."""
        self.failed |= failures
        self.targets = [url for url in self.targets if url not in failures]

    def report(self) -> PublishReport:
        """Return the outcome. Raises ReachedNoEngine, with reasons, if all engines of the publication failed."""
        permanent = frozenset(self.permanent & self.failed.keys())
        blameless = frozenset(self.blameless & self.failed.keys())
        if self.publication.engines and not self.pauses_s:
            reasons = [f"{url} {reason}" for url, reason in self.failed.items()]
            more = [f"and {len(reasons) - _LISTED} more"] if len(reasons) > _LISTED else []
            raise ReachedNoEngine(
                f"weights {self.publication.name} reached no engine: {'; '.join([*reasons[:_LISTED], *more])}",
                failed=self.failed,
                permanent=permanent,
                blameless=blameless,
            )
        return PublishReport(
            version=self.publication.version,
            epoch=self.publication.epoch,
            digest=self.digest,
            send_s=self.send_s,
            total_s=time.monotonic() - self.began,
            pauses_s=self.pauses_s,
            failed=self.failed,
            permanent=permanent,
            blameless=blameless,
        )


class Publisher(Protocol):
    """Interface for sending weights to engines."""

    async def publish(self, publication: Publication) -> PublishReport:
        """Publish the weights. Engines that fail are reported; raises UpdateError only if no engine is served."""
        ...

    async def close(self) -> None: ...
