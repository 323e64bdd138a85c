"""What a pull is, for those who ask and those who do it: `PullOrder`, and `PullSource`, which fills a buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

#: Bytes [start, end) of a version.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a version that lies on the same servers.

    Attributes:
        sources: base URLs of the servers, the one to ask first in front.
        ranges: what they hold, in order.
    """

    sources: tuple[str, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Which weights to fetch, and where.

    Attributes:
        shards: where to find which bytes; no byte twice.
        digest: XXH3-128 of all these bytes in order, in hexadecimal.
        deadline: in monotonic seconds.
        given_up: set by whoever wants the bytes no more.
    """

    shards: tuple[Shard, ...]
    epoch: int
    version: int
    digest: str
    deadline: float
    given_up: threading.Event


class PullSource(Protocol):
    """Fetches weights that wait elsewhere, for the transport `pull`; blocks, on a thread of its own."""

    def fetch(self, order: PullOrder, *, into: Any, on_progress: Callable[[int], None]) -> str:
        """Fill `into`, flat uint8 (numpy or torch), where the shards' ranges say; returns the digest of what came.

        `on_progress` is told how many bytes are there.

        Raises:
            UpdateError: the sources of a shard could not give it, or it was given up.
            DeadlineError: they did not come in time.
            DigestMismatch: what came is not what was announced.
        """
        ...
