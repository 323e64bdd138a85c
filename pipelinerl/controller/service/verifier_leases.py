"""`VerifierLeases`: the verifier services that actors may use: those that have said lately that they are there.

Nothing of it is journaled: a controller that comes back hears of each service again within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from pipelinerl.controller.routes import LEASE_S
from pipelinerl.verifiers.service.wire import VerifierLease

log = logging.getLogger("pipelinerl")

#: Services at a time: every actor is told of all of them, each second.
MOST_SERVICES: Final = 256


@final
class VerifierLeases:
    """Services by URL, each until `LEASE_S` after it was last heard of; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[VerifierLease, float]] = {}

    def offer(self, lease: VerifierLease) -> bool:
        """A service is there, or still is; False where it is one more than `MOST_SERVICES`, and is not taken."""
        if lease.url not in self._leases:
            if len(self._leases) >= MOST_SERVICES and len(self.current()) >= MOST_SERVICES:
                return False
            log.info("the verifier service at %s joins; it judges %s", lease.url, ", ".join(lease.domains))
        self._leases[lease.url] = lease, self._clock() + LEASE_S
        return True

    def withdraw(self, url: str) -> None:
        """A service takes nothing new; one that nobody knows takes nothing either."""
        if self._leases.pop(url, None) is not None:
            log.info("the verifier service at %s leaves", url)

    def current(self) -> tuple[VerifierLease, ...]:
        """Those that may be used now."""
        now = self._clock()
        for url in [url for url, (_, until) in self._leases.items() if now >= until]:
            del self._leases[url]
            log.warning("the verifier service at %s has not been heard of for %g s", url, LEASE_S)
        return tuple(lease for lease, _ in self._leases.values())
