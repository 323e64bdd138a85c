"""The engines of a run as the controller sees them: who is there, what they serve, who may be given work.

    joining ──published──▶ healthy ──silence, or an update failed──▶ dead ──answers──▶ joining
       ▲                                     └──too often in a row──▶ expelled
       └──── a new life of it, or an operator ◀──────────────────────────┘

Only a healthy engine gets work, and only a successful publication makes one healthy: an engine that was away, or whose
update failed, must first be given the current weights. The membership number grows whenever the set changes, since a
process group cannot lose or gain a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import final


class Standing(StrEnum):
    """May this engine be given work?"""

    JOINING = "joining"
    HEALTHY = "healthy"
    DEAD = "dead"
    EXPELLED = "expelled"
    """It failed too many updates in a row, or an operator took it out: what it offers in this life is not heard."""

    @property
    def is_alive(self) -> bool:
        """Must a publication reach it?"""
        return self in (Standing.JOINING, Standing.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine; `loaded` is the version last published to it in this epoch."""

    url: str
    incarnation: str = ""
    standing: Standing = Standing.JOINING
    loaded: int = -1
    failed_updates: int = 0
    last_error: str = ""


@final
@dataclass(slots=True)
class Fleet:
    """Records by base URL. Pure: observations come in as arguments."""

    by_url: dict[str, EngineRecord] = field(default_factory=dict)
    membership: int = 0
    updates_to_expulsion: int = 5

    def records(self) -> list[EngineRecord]:
        """All engines, by URL."""
        return [self.by_url[url] for url in sorted(self.by_url)]

    def members(self) -> list[str]:
        """Engines that a publication must reach: all that are alive."""
        return [record.url for record in self.records() if record.standing.is_alive]

    def serving(self) -> list[str]:
        """Engines that may be given work."""
        return [record.url for record in self.records() if record.standing is Standing.HEALTHY]

    def oldest_loaded(self) -> int | None:
        """The oldest version that a healthy engine samples from; None without one."""
        return min((r.loaded for r in self.by_url.values() if r.standing is Standing.HEALTHY), default=None)

    def awaits_weights(self) -> bool:
        """Is an engine alive that has not been given the weights of this epoch?"""
        return any(record.standing is Standing.JOINING for record in self.by_url.values())

    def join(self, url: str, incarnation: str = "") -> bool:
        """Add an engine, or bring one back that was expelled; True when the set changed. The dead return by an answer.

        An engine repeats its offer as long as it lives. `incarnation` tells its lives apart, since a new one has lost
        its weights; it is empty when an operator asks.
        """
        known = self.by_url.get(url)
        if known is not None:
            same_life = known.incarnation in ("", incarnation)
            repeated = same_life if incarnation else known.standing is not Standing.EXPELLED
            if repeated:
                self.by_url[url] = replace(known, incarnation=known.incarnation or incarnation)
                return False
        self.by_url[url] = EngineRecord(url=url, incarnation=incarnation)
        self.membership += 1
        return True

    def expel(self, url: str, reason: str) -> None:
        """Give an engine no more work and no more weights."""
        record = self.by_url[url]
        self.membership += record.standing.is_alive
        self.by_url[url] = replace(record, standing=Standing.EXPELLED, loaded=-1, last_error=reason)

    def begin_epoch(self) -> None:
        """A new trainer: nobody has its weights, and its group must be formed anew."""
        self.membership += 1
        for url, record in self.by_url.items():
            if record.standing is Standing.HEALTHY:
                self.by_url[url] = replace(record, standing=Standing.JOINING, loaded=-1)

    def published(self, url: str, version: int) -> None:
        """The engine serves `version` now."""
        if url in self.by_url:
            self.by_url[url] = replace(
                self.by_url[url],
                standing=Standing.HEALTHY,
                loaded=version,
                failed_updates=0,
                last_error="",
            )

    def publish_failed(self, url: str, reason: str) -> bool:
        """The engine did not take an update, and is tried again once it answers, unless it failed too often.

        True when it is lost by that. Not to ask it at once keeps one that died from disturbing the others' group.
        """
        if url not in self.members():
            return False
        record = self.by_url[url]
        failures = record.failed_updates + 1
        standing = Standing.EXPELLED if failures >= self.updates_to_expulsion else Standing.DEAD
        self.by_url[url] = replace(record, standing=standing, loaded=-1, failed_updates=failures, last_error=reason)
        self.membership += 1
        return True

    def returned(self, url: str) -> bool:
        """A dead engine answers: it joins anew. True when that changed the set."""
        return self._rejoin(url, Standing.DEAD, "")

    def restarted(self, url: str) -> bool:
        """A healthy engine began anew behind our back and lost its weights: it joins anew."""
        return self._rejoin(url, Standing.HEALTHY, "it restarted")

    def silent(self, url: str, reason: str) -> bool:
        """The engine has not answered for too long; True when that is news."""
        if url not in self.members():
            return False
        self.by_url[url] = replace(self.by_url[url], standing=Standing.DEAD, loaded=-1, last_error=reason)
        self.membership += 1
        return True

    def _rejoin(self, url: str, standing: Standing, reason: str) -> bool:
        record = self.by_url.get(url)
        if record is None or record.standing is not standing:
            return False
        self.by_url[url] = replace(record, standing=Standing.JOINING, loaded=-1, last_error=reason)
        self.membership += 1
        return True
