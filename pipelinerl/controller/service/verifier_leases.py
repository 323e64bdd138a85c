"""`VerifierLeases`: the verifier services that actors may use, because the services have repeated their offers
recently.

Leases are not journaled: a restarted controller receives each service's offer again within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from pipelinerl.controller.routes import LEASE_S
from pipelinerl.verifiers.service.wire import VerifierLease

log = logging.getLogger("pipelinerl")

#: The most services at a time: every actor receives the whole list each second.
MOST_SERVICES: Final = 256


@final
class VerifierLeases:
    """Services by URL, each valid for `LEASE_S` after its last offer; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[VerifierLease, float]] = {}

    def offer(self, lease: VerifierLease) -> bool:
        """Add a service or renew its lease; return False if there are already `MOST_SERVICES` other services."""
        if lease.url not in self._leases:
            if len(self._leases) >= MOST_SERVICES and len(self.current()) >= MOST_SERVICES:
                return False
            log.info("the verifier service at %s joins; it judges %s", lease.url, ", ".join(lease.domains))
        self._leases[lease.url] = lease, self._clock() + LEASE_S
        return True

    def withdraw(self, url: str) -> None:
        """Remove a service; unknown services are ignored."""
        if self._leases.pop(url, None) is not None:
            log.info("the verifier service at %s leaves", url)

    def current(self) -> tuple[VerifierLease, ...]:
        """Return the services that may be used now, and drop expired ones."""
        now = self._clock()
        for url in [url for url, (_, until) in self._leases.items() if now >= until]:
            del self._leases[url]
            log.warning("the verifier service at %s has been silent for %g s", url, LEASE_S)
        return tuple(lease for lease, _ in self._leases.values())
