"""`WeightPuller`: fetches a version from the first parameter server that can give it, on the best road to it.

    ask the server for its record ─▶ map its segment, or open streams ─▶ parts land and are hashed ─▶ compare digests

Promises: what has landed from a server that broke off is kept, and the next server gives the rest; nothing is returned
whose digest is not the one announced; it ends by the deadline, and soon after it is given up. A server that does not
say what it holds (any that satisfies the contract, without being ours) is fetched from by HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, final

from inference_contract.errors import ContractError, DigestMismatch, NotPrepared
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.weights import server_wire
from pipelinerl.weights.landing import Landing
from pipelinerl.weights.pull import PullOrder
from pipelinerl.weights.roads import HttpRoad, MemoryRoad, Road, check_wanted
from pipelinerl.weights.segment import Access, Attachments, SegmentAddress
from pipelinerl.weights.server_client import ServerClient
from pipelinerl.weights.server_wire import VersionRecord

#: A server that is there says what it holds within this time.
_RECORD_S: Final = 5.0


@final
class WeightPuller:
    """Satisfies `PullSource`. One pull at a time; the segments of the servers it has asked stay mapped."""

    def __init__(self, *, token: str | None, shared_memory: bool = True) -> None:
        """`token` is the servers' bearer token; without `shared_memory` everything goes by HTTP."""
        self._token = token
        self._shared_memory = shared_memory
        self._attached = Attachments(Access.READ)

    def fetch(self, order: PullOrder, *, into: Any, came: Callable[[int], None] = lambda _: None) -> str:
        """Fill `into`; see `PullSource`."""
        landing: Landing | None = None
        failures: dict[str, UpdateError | DeadlineError | ContractError] = {}
        for source in order.sources:
            check_wanted(order)
            try:
                road = self._road(source, order)
                if landing is None:
                    landing = Landing(into, part_bytes=road.part_bytes, came=came)
                road.bring(order, landing)
                return _agreed(order, landing)
            except DigestMismatch as error:
                # Some server gave wrong bytes, and nobody knows which: from the next one, all of them.
                failures[source], landing = error, None
            except (UpdateError, DeadlineError, ContractError) as error:
                failures[source] = error
        check_wanted(order)
        if failures and all(isinstance(error, DigestMismatch) for error in failures.values()):
            raise next(iter(failures.values()))
        reasons = "; ".join(f"{source}: {error}" for source, error in failures.items())
        raise UpdateError(f"no source gave version {order.epoch}.{order.version}: {reasons}")

    def _road(self, source: str, order: PullOrder) -> Road:
        """Through memory where the server's segment can be mapped here, else by HTTP."""
        address = self._segment(source, order) if self._shared_memory else None
        attachment = None if address is None else self._attached.to(source, address)
        return HttpRoad(source, token=self._token) if attachment is None else MemoryRoad(attachment)

    def _segment(self, source: str, order: PullOrder) -> SegmentAddress | None:
        """Where the server says that the version lies; None if it does not say, or knows no more than the contract.

        Raises:
            UpdateError, NotPrepared: the server cannot be reached, or does not hold the version.
        """
        client = ServerClient(source, token=self._token)
        path = server_wire.VERSION.format(epoch=order.epoch, version=order.version)
        try:
            deadline = min(order.deadline, time.monotonic() + _RECORD_S)
            return client.call("GET", path, VersionRecord, deadline=deadline).segment
        except NotPrepared:
            raise
        except ContractError:
            return None
        finally:
            client.close()


def _agreed(order: PullOrder, landing: Landing) -> str:
    """The digest of what landed. Raises `DigestMismatch` when it is not the one that was announced."""
    digest = landing.digest()
    if digest != order.digest:
        raise DigestMismatch(
            f"version {order.epoch}.{order.version}: digest must be {order.digest}, received {digest}; the old weights "
            "still serve",
            param="digest",
        )
    return digest
