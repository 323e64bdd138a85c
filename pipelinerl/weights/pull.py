"""Interface for pulling weights from servers: a `PullOrder` describes the weights, a `PullSource` fetches them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

#: A range of bytes [start, end) of a version.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """Byte `ranges` of a version's weights, and the URLs of the servers that hold them, in the order to try."""

    sources: tuple[str, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """The weights to fetch, and the servers from which to fetch them; set `given_up` to cancel the pull.

    `digest` is the XXH3-128 of all bytes of the (disjoint) shards in order, in hexadecimal; `deadline` is monotonic.
    """

    shards: tuple[Shard, ...]
    epoch: int
    version: int
    digest: str
    deadline: float
    given_up: threading.Event


class PullSource(Protocol):
    """Fetches weights from servers for the transport `pull`. It blocks, so call it on a separate thread."""

    def fetch(self, order: PullOrder, *, into: Any, on_progress: Callable[[int], None]) -> str:
        """Fill the shards' ranges of `into`, flat uint8 (numpy or torch); return the digest of the bytes received.

        `on_progress` is called with the number of bytes so far. Raises UpdateError if a shard has no working source or
        the pull was cancelled, DeadlineError if the deadline passes, DigestMismatch if the bytes differ from the
        digest.
        """
        ...
