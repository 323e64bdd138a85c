"""The engines of a run as the controller sees them: who is there, what they serve, who may be given work.

    joining ──published──▶ healthy ──missed polls, or an update failed──▶ dead ──answers──▶ joining
       ▲                                     └──too often in a row──▶ expelled
       └──── a new life of it, or an operator ◀──────────────────────────┘

Only a healthy engine gets work, and only a successful publication makes one healthy: an engine that was away, or whose
update failed, must first be given the current weights. The membership number grows whenever the set changes, since a
process group cannot lose or gain a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, final

from inference_contract.schemas import EngineMetrics


class Standing(StrEnum):
    """May this engine be given work?"""

    JOINING = "joining"
    HEALTHY = "healthy"
    DEAD = "dead"
    EXPELLED = "expelled"
    """It failed too many updates in a row, or an operator took it out: what it offers in this life is not heard."""


_ALIVE: Final = (Standing.JOINING, Standing.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine; `loaded` is the version last published to it in this epoch."""

    url: str
    incarnation: str = ""
    standing: Standing = Standing.JOINING
    loaded: int = -1
    missed_polls: int = 0
    failed_updates: int = 0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tokens_per_s: float = 0.0
    occupancy: float = 0.0
    polled_at: float = 0.0
    last_error: str = ""


@final
class Fleet:
    """Records by base URL. Pure: time and observations come in as arguments."""

    def __init__(self, *, polls_to_death: int = 5, updates_to_expulsion: int = 5) -> None:
        self._records: dict[str, EngineRecord] = {}
        self._polls_to_death = polls_to_death
        self._updates_to_expulsion = updates_to_expulsion
        self.membership = 0

    def records(self) -> list[EngineRecord]:
        """All engines, by URL."""
        return [self._records[url] for url in sorted(self._records)]

    def members(self) -> list[str]:
        """Engines that a publication must reach: all that are alive."""
        return [record.url for record in self.records() if record.standing in _ALIVE]

    def serving(self) -> list[str]:
        """Engines that may be given work."""
        return [record.url for record in self.records() if record.standing is Standing.HEALTHY]

    def oldest_loaded(self) -> int | None:
        """The oldest version that a healthy engine samples from; None without one."""
        return min((r.loaded for r in self._records.values() if r.standing is Standing.HEALTHY), default=None)

    def awaits_weights(self) -> bool:
        """Is an engine alive that has not been given the weights of this epoch?"""
        return any(record.standing is Standing.JOINING for record in self._records.values())

    def join(self, url: str, incarnation: str = "") -> bool:
        """Add an engine, or bring one back that was expelled; True when the set changed. The dead return by a poll.

        An engine repeats its offer as long as it lives. `incarnation` tells its lives apart, since a new one has lost
        its weights; it is empty when an operator asks.
        """
        known = self._records.get(url)
        if known is not None:
            same_life = known.incarnation in ("", incarnation)
            repeated = same_life if incarnation else known.standing is not Standing.EXPELLED
            if repeated:
                self._records[url] = replace(known, incarnation=known.incarnation or incarnation)
                return False
        self._records[url] = EngineRecord(url=url, incarnation=incarnation)
        self.membership += 1
        return True

    def expel(self, url: str, reason: str) -> None:
        """Give an engine no more work and no more weights."""
        record = self._records[url]
        self.membership += record.standing in _ALIVE
        self._records[url] = replace(record, standing=Standing.EXPELLED, loaded=-1, last_error=reason)

    def begin_epoch(self) -> None:
        """A new trainer: nobody has its weights, and its group must be formed anew."""
        self.membership += 1
        for url, record in self._records.items():
            if record.standing is Standing.HEALTHY:
                self._records[url] = replace(record, standing=Standing.JOINING, loaded=-1)

    def published(self, url: str, version: int) -> None:
        """The engine serves `version` now."""
        if url in self._records:
            self._records[url] = replace(
                self._records[url],
                standing=Standing.HEALTHY,
                loaded=version,
                missed_polls=0,
                failed_updates=0,
                last_error="",
            )

    def publish_failed(self, url: str, reason: str) -> bool:
        """The engine did not take an update, and is tried again once it answers, unless it failed too often.

        True when it is lost by that. Not to ask it at once keeps one that died from disturbing the others' group.
        """
        if url not in self.members():
            return False
        record = self._records[url]
        failures = record.failed_updates + 1
        standing = Standing.EXPELLED if failures >= self._updates_to_expulsion else Standing.DEAD
        self._records[url] = replace(record, standing=standing, loaded=-1, failed_updates=failures, last_error=reason)
        self.membership += 1
        return True

    def answered(self, url: str, metrics: EngineMetrics, now: float) -> bool:
        """A poll succeeded; True when that brings the engine back.

        One that restarted behind our back has lost its weights and joins anew.
        """
        record = self._records.get(url)
        if record is None:
            return False
        if record.standing is Standing.DEAD:
            self._records[url] = replace(record, standing=Standing.JOINING, missed_polls=0)
            self.membership += 1
            return True
        previous, seconds = record.metrics, now - record.polled_at
        restarted = (
            metrics.generated_tokens_total < previous.generated_tokens_total
            or metrics.weight_updates_total < previous.weight_updates_total
        )
        if restarted and record.standing is Standing.HEALTHY:
            record = replace(record, standing=Standing.JOINING, loaded=-1, last_error="it restarted")
            self.membership += 1
        steps = metrics.decode_steps_total - previous.decode_steps_total
        busy = metrics.occupied_slot_steps_total - previous.occupied_slot_steps_total
        fresh = restarted or record.polled_at == 0.0 or seconds <= 0
        rate = 0.0 if fresh else (metrics.generated_tokens_total - previous.generated_tokens_total) / seconds
        self._records[url] = replace(
            record,
            missed_polls=0,
            metrics=metrics,
            polled_at=now,
            tokens_per_s=rate,
            occupancy=busy / (steps * metrics.slots) if steps > 0 and metrics.slots and not fresh else 0.0,
        )
        return False

    def missed(self, url: str, reason: str) -> bool:
        """A poll failed; True when the engine is dead now."""
        record = self._records.get(url)
        if record is None or url not in self.members():
            return False
        record = replace(record, missed_polls=record.missed_polls + 1, last_error=reason)
        dead = record.missed_polls >= self._polls_to_death
        if dead:
            record = replace(record, standing=Standing.DEAD, loaded=-1)
            self.membership += 1
        self._records[url] = record
        return dead
