"""What a pull is, for those who ask and those who do it: `PullOrder`, and `PullSource`, which fills a buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Which weights to fetch, and where.

    Attributes:
        sources: base URLs of servers that hold them, the one to ask first in front.
        digest: XXH3-128 of all bytes, in hexadecimal.
        deadline: in monotonic seconds.
        given_up: set by whoever wants the bytes no more.
    """

    sources: tuple[str, ...]
    epoch: int
    version: int
    digest: str
    deadline: float
    given_up: threading.Event


class PullSource(Protocol):
    """Fetches weights that wait elsewhere, for the transport `pull`; blocks, on a thread of its own."""

    def fetch(self, order: PullOrder, *, into: Any, came: Callable[[int], None]) -> str:
        """Fill `into`, flat uint8 (numpy or torch); `came` is told how many bytes are there. Returns their digest.

        Raises:
            UpdateError: no source could give them, or they were given up.
            DeadlineError: they did not come in time.
            DigestMismatch: what came is not what was announced.
        """
        ...
