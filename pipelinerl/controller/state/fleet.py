"""The engines of a run as the controller sees them: who is there, what they serve, who may be given work.

    joining ──weights, then proof──▶ healthy ◀──answers── suspect ──silence──▶ dead ──answers──▶ joining
       ▲ ◀──answers── dirty ◀── an update or the proof failed     └─misses a poll─▲
       └── a new life, an operator, its own offer after a rest ── expelled ◀── failed too often, removed, drained

| event           | joining         | healthy  | suspect  | draining | dirty    | dead     | expelled |
|-----------------|-----------------|----------|----------|----------|----------|----------|----------|
| `join` new life | joining         | joining  | joining  | expelled | joining  | joining  | joining  |
| `join` same life| –               | –        | –        | –        | –        | –        | – (rest) |
| `on_published`  | has its weights | healthy  | suspect  | draining | –        | –        | –        |
| `on_verified`   | healthy         | –        | –        | –        | –        | –        | –        |
| `canary_failed`  | dirty, expelled | –        | –        | –        | –        | –        | –        |
| `publish_failed`| dirty, expelled | dirty, … | dirty, … | expelled | –        | –        | –        |
| `update_missed` | dirty           | dirty    | dirty    | expelled | –        | –        | –        |
| `on_missed_poll` | –               | suspect  | –        | –        | –        | –        | –        |
| `answered`      | –               | –        | healthy  | –        | joining  | joining  | –        |
| `on_timeout`    | dead            | dead     | dead     | expelled | –        | –        | –        |
| `restarted`     | joining         | joining  | joining  | expelled | –        | –        | –        |
| `drain`         | draining        | draining | draining | –        | expelled | expelled | –        |
| `expel`         | expelled        | expelled | expelled | expelled | expelled | expelled | –        |
| `begin_epoch`   | joining         | joining  | joining  | draining | dirty    | dead     | expelled |

Only a healthy engine is given work, and the only way to become healthy is `on_published`, then `on_verified` of that
version: an engine that was away, or failed, must first be given the current weights whole, and show that it computes
with them what the trainer does. One that has shown the contrary stays dirty until there is a newer version, while
others serve. The membership number grows whenever the set that a publication must reach changes, since a process group
cannot lose or gain a rank; what is reported of an older set says nothing of an engine that joined later.

An engine that was expelled for failures is taken back after a rest, if it still offers itself and time may mend why it
failed. Each further expulsion doubles the rest. An address whose processes die one after another before they prove any
weights is taken back at doubling intervals (`offer_wait_s`).

A healthy engine may be pinned for a while: it keeps the weights it has, and answers only those who ask for it by name.
Whatever ends its being healthy or suspect ends that, too; released, it joins anew unless its weights are the newest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, final

from inference_contract.errors import Persistence


class EngineLifecycle(StrEnum):
    """May this engine be given work?"""

    JOINING = "joining"
    """It waits for weights, or has them and has yet to prove them."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It missed a poll: it gets no new work until it answers, and keeps what it has."""
    DRAINING = "draining"
    """It ends what it has, and then goes; until then its weights are kept up to date."""
    DIRTY = "dirty"
    """An update or its proof failed: what it serves is not to be trusted. It joins anew once it answers."""
    DEAD = "dead"
    EXPELLED = "expelled"
    """It failed too often in a row, or an operator took it out."""

    @property
    def is_alive(self) -> bool:
        """Must a publication reach it?"""
        return self in (
            EngineLifecycle.JOINING,
            EngineLifecycle.HEALTHY,
            EngineLifecycle.SUSPECT,
            EngineLifecycle.DRAINING,
        )


#: Those whose weights were proven and are kept up to date.
_VERIFIED: Final = (EngineLifecycle.HEALTHY, EngineLifecycle.SUSPECT)
#: Those that get no new work and may end what they have.
_FINISHING: Final = (EngineLifecycle.JOINING, EngineLifecycle.SUSPECT, EngineLifecycle.DRAINING)

#: Seconds between lives of an address of which two in a row have died unproven; doubled for each further, up to:
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
#: Seconds that an engine rests after it was expelled for failures; doubled with each expulsion, up to:
_FIRST_REST_S: Final = 30.0
_LONGEST_REST_S: Final = 600.0

_LOCALHOST: Final = re.compile(r"(?<=://)localhost(?=:|$)", re.IGNORECASE)


def base_url(engine: str) -> str:
    """The URL as the fleet has it: an engine has one, however this machine is called. A name stays as it is."""
    return _LOCALHOST.sub("127.0.0.1", engine.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine.

    Attributes:
        incarnation: one life of it; empty when only an operator has named it.
        name, type: as it calls itself; empty likewise.
        joined_at: the membership that begins with it.
        loaded: the version last published to it in this epoch; −1 when none was.
        refused: the version whose proof failed last; that one is not published to it again while others serve.
        failed_updates, failed_checks: since it last proved its weights; a proof that it did not give is of the first.
        offered_at: when this life of it offered itself first, on the controller's clock.
        proven: this life of it has proven weights.
        unproven_lives: lives before this one, in a row, that ended without a proof.
        expulsions: for failures, since it last proved its weights.
        returns_at: when it may come back, counted from its first sign of life after the failure; 0 before that.
        draining_since, drain_by: when an operator asked, and how long what it has may run; on the controller's clock.
        to_stop: an operator took it out: whoever started its process may end it.
        refuses: no retry mends why it was expelled; another life of it may.
        pinned: it is left out of publications, and out of what others may be given.
    """

    url: str
    incarnation: str = ""
    name: str = ""
    type: str = ""
    lifecycle: EngineLifecycle = EngineLifecycle.JOINING
    joined_at: int = 0
    loaded: int = -1
    refused: int = -1
    failed_updates: int = 0
    failed_checks: int = 0
    offered_at: float = 0.0
    proven: bool = False
    unproven_lives: int = 0
    expulsions: int = 0
    returns_at: float = 0.0
    draining_since: float = 0.0
    drain_by: float = 0.0
    to_stop: bool = False
    refuses: bool = False
    pinned: bool = False
    last_error: str = ""

    @property
    def may_return(self) -> bool:
        """Whether it was expelled for failures that time may mend."""
        return self.lifecycle is EngineLifecycle.EXPELLED and self.expulsions > 0 and not (self.refuses or self.to_stop)


@final
@dataclass(slots=True)
class Fleet:
    """Records by base URL, and in that order. Pure: observations are arguments. What returns a bool says whether it
    changed anything."""

    by_url: dict[str, EngineRecord] = field(default_factory=dict)
    membership: int = 0
    updates_to_expulsion: int = 5
    checks_to_expulsion: int = 2

    def __post_init__(self) -> None:
        """As `join` keeps it: it is looked through many times a second, and grows rarely."""
        self.by_url = dict(sorted(self.by_url.items()))

    def records(self) -> list[EngineRecord]:
        """All engines, by URL."""
        return list(self.by_url.values())

    def members(self) -> list[str]:
        """Engines that a publication must reach: all that are alive, and not pinned."""
        return [record.url for record in self.records() if record.lifecycle.is_alive and not record.pinned]

    def serving(self) -> list[str]:
        """Engines that may be given work."""
        return self._in(EngineLifecycle.HEALTHY)

    def finishing(self) -> list[str]:
        """Engines that get no new work and may end what they have; what any other has is handed over."""
        return [record.url for record in self.records() if record.lifecycle in _FINISHING or record.pinned]

    def verified(self) -> list[str]:
        """Engines on which work can be counted: those that serve, or will once they answer again."""
        return self._in(*_VERIFIED)

    def pinned(self) -> list[str]:
        """Engines that keep the weights they have, and work only for those who ask for them by name."""
        return [record.url for record in self.records() if record.pinned]

    def to_verify(self) -> list[str]:
        """Engines that must prove the weights which the next publication gives them."""
        return self._in(EngineLifecycle.JOINING)

    def is_draining(self, url: str) -> bool:
        """Does it end what it has?"""
        return self._lifecycle(url) is EngineLifecycle.DRAINING

    def oldest_loaded(self) -> int | None:
        """The oldest version that a proven engine samples from; None without one."""
        proven = (each.loaded for each in self.by_url.values() if each.lifecycle in _VERIFIED and not each.pinned)
        return min(proven, default=None)

    def without_weights(self) -> list[str]:
        """Engines that are alive and have no weights of this epoch."""
        joining = (each for each in self.by_url.values() if each.lifecycle is EngineLifecycle.JOINING)
        return sorted(each.url for each in joining if each.loaded < 0)

    # --- coming ----------------------------------------------------------------------------------------------------

    def is_known(self, url: str, incarnation: str, *, name: str, type: str, now: float) -> bool:
        """Would `join` find this life of the engine here, and nothing of it new?"""
        known = self.by_url.get(url)
        if known is None or (known.incarnation, known.name, known.type) != (incarnation, name, type):
            return False
        return not known.may_return or now < known.returns_at

    def offer_wait_s(self, url: str, incarnation: str, *, now: float) -> float:
        """Return for how long a new life at this address is kept waiting, since those before died unproven."""
        known = self.by_url.get(url)
        if known is None or not incarnation or known.incarnation in ("", incarnation):
            return 0.0
        if known.proven or known.to_stop or not known.unproven_lives:
            return 0.0
        wait_s = min(_FIRST_WAIT_S * 2 ** (known.unproven_lives - 1), _LONGEST_WAIT_S)
        return max(0.0, known.offered_at + wait_s - now)

    def join(self, url: str, incarnation: str = "", *, name: str = "", type: str = "", now: float = 0.0) -> bool:
        """Add an engine, or bring one back that was expelled. The dead return by an answer.

        An engine repeats its offer as long as it lives. `incarnation` tells its lives apart, since a new one has lost
        its weights; it is empty when an operator asks.
        """
        known, unproven_lives = self.by_url.get(url), 0
        if known is not None:
            same_life = known.incarnation in ("", incarnation)
            repeated = same_life if incarnation else known.lifecycle is not EngineLifecycle.EXPELLED
            if repeated and known.may_return:
                return self._rested(known, now=now)
            if repeated:
                self._change(
                    url,
                    incarnation=known.incarnation or incarnation,
                    name=known.name or name,
                    type=known.type or type,
                )
                return False
            if known.lifecycle is EngineLifecycle.DRAINING:
                self._change(url, incarnation=incarnation)
                return self.expel(url, "it restarted while it was drained", to_stop=True)
            if incarnation and not known.proven:
                unproven_lives = known.unproven_lives + 1
        self.membership += 1
        made = EngineRecord(
            url=url,
            incarnation=incarnation,
            name=name,
            type=type,
            joined_at=self.membership,
            offered_at=now,
            unproven_lives=unproven_lives,
        )
        self.by_url = dict(sorted({**self.by_url, url: made}.items()))
        return True

    def _rested(self, known: EngineRecord, *, now: float) -> bool:
        """Take an expelled engine back that offers itself after its rest, which begins with its first offer."""
        if not known.returns_at:
            rest_s = min(_FIRST_REST_S * 2 ** (known.expulsions - 1), _LONGEST_REST_S)
            self._change(known.url, returns_at=now + rest_s)
            return False
        if now < known.returns_at:
            return False
        self._rejoin(known.url, known.last_error)
        self._change(known.url, failed_updates=0)
        self.membership += 1
        return True

    def begin_epoch(self) -> None:
        """A new trainer: nobody has its weights, and its group must be formed anew."""
        for url, record in list(self.by_url.items()):
            self._change(url, refused=-1)
            if record.lifecycle in (EngineLifecycle.JOINING, *_VERIFIED):
                self._rejoin(url, record.last_error)
            elif record.lifecycle is EngineLifecycle.DRAINING:
                self._change(url, loaded=-1)
        self.membership += 1

    # --- weights ---------------------------------------------------------------------------------------------------

    def on_published(self, url: str, version: int, *, membership: int) -> None:
        """The engine serves `version` now, by a publication to that membership.

        That forgives no failure, as the proof does: it may take weights again and again, and never answer.
        """
        if self._was_member(url, membership):
            self._change(url, loaded=version)

    def publish_failed(
        self, url: str, reason: str, *, membership: int, persistence: Persistence = Persistence.TRANSIENT
    ) -> bool:
        """The engine did not take an update, and is tried again once it answers, unless it failed too often, or will.

        Not to ask it at once keeps one that died from disturbing the others' group.
        """
        if not self._was_member(url, membership):
            return False
        failures, lasts = self.by_url[url].failed_updates + 1, persistence is Persistence.PERMANENT
        self._change(url, failed_updates=failures, refuses=lasts)
        return self._mark_dirty(url, reason, spent=lasts or failures >= self.updates_to_expulsion)

    def update_missed(self, url: str, reason: str, *, membership: int) -> bool:
        """The engine did not get an update because of others: it is tried again, and nothing is held against it."""
        return self._was_member(url, membership) and self._mark_dirty(url, reason, spent=False)

    def on_verified(self, url: str, version: int, *, membership: int) -> bool:
        """The engine computes with `version` what the trainer does."""
        record = self.by_url.get(url)
        if record is None or not self._was_member(url, membership):
            return False
        if record.lifecycle is not EngineLifecycle.JOINING or record.loaded != version:
            return False
        self._change(
            url,
            lifecycle=EngineLifecycle.HEALTHY,
            refused=-1,
            failed_updates=0,
            failed_checks=0,
            proven=True,
            unproven_lives=0,
            expulsions=0,
            last_error="",
        )
        return True

    def canary_failed(self, url: str, version: int, reason: str, *, membership: int) -> bool:
        """The engine has `version` and does not compute with it what the trainer does."""
        record = self.by_url.get(url)
        if record is None or not self._was_member(url, membership) or record.lifecycle is not EngineLifecycle.JOINING:
            return False
        failures = record.failed_checks + 1
        spent = failures >= self.checks_to_expulsion
        self._change(url, refused=version, failed_checks=failures, refuses=spent)
        return self._mark_dirty(url, reason, spent=spent)

    def pin(self, url: str) -> None:
        """A healthy engine keeps the weights it has."""
        self._change(url, pinned=True)
        self.membership += 1

    def release(self, url: str, *, version: int) -> None:
        """Pinned no longer: it serves at once with the newest `version`, else it must first be given that."""
        record = self.by_url.get(url)
        if record is None or not record.pinned:
            return
        self._change(url, pinned=False)
        if record.loaded != version:
            self._rejoin(url, record.last_error)
        self.membership += 1

    # --- polls -----------------------------------------------------------------------------------------------------

    def on_missed_poll(self, url: str) -> bool:
        """A healthy engine did not answer a poll."""
        if self._lifecycle(url) is not EngineLifecycle.HEALTHY:
            return False
        self._change(url, lifecycle=EngineLifecycle.SUSPECT)
        return True

    def answered(self, url: str, *, version: int, now: float = 0.0) -> bool:
        """One that was not trusted answers again: a suspect goes on, the dead and the dirty join anew.

        While others serve, one whose proof failed waits until the newest `version` is another. One that has yet to
        prove any weights waits longer after each failure, as each costs the others a new group.
        """
        match self._lifecycle(url):
            case EngineLifecycle.SUSPECT:
                self._change(url, lifecycle=EngineLifecycle.HEALTHY)
            case EngineLifecycle.DEAD | EngineLifecycle.DIRTY if (
                self.by_url[url].refused != version or not self.verified()
            ) and self._retry_is_due(url, now=now):
                self._rejoin(url, self.by_url[url].last_error)
                self.membership += 1
            case _:
                return False
        return True

    def _retry_is_due(self, url: str, *, now: float) -> bool:
        """Whether a failed engine is tried again; its wait begins with its first answer after the failure."""
        record = self.by_url[url]
        setbacks = record.failed_updates + record.unproven_lives
        if record.proven or setbacks < 2:
            return True
        if not record.returns_at:
            self._change(url, returns_at=now + min(_FIRST_WAIT_S * 2 ** (setbacks - 2), _LONGEST_WAIT_S))
        return now >= self.by_url[url].returns_at

    def on_timeout(self, url: str, reason: str) -> bool:
        """The engine has not answered for too long."""
        return self._lose(url, reason, EngineLifecycle.DEAD)

    def restarted(self, url: str) -> bool:
        """An engine began anew behind our back and lost its weights: it joins anew."""
        record = self.by_url.get(url)
        if record is None or record.loaded < 0:
            return False
        return self._lose(url, "it restarted", EngineLifecycle.JOINING)

    # --- going -----------------------------------------------------------------------------------------------------

    def drain(self, url: str, *, now: float, by: float) -> bool:
        """Give the engine no more work; what it has may run until `by`."""
        lifecycle = self._lifecycle(url)
        if lifecycle in (EngineLifecycle.DRAINING, EngineLifecycle.EXPELLED, None):
            return False
        if not lifecycle.is_alive:
            return self.expel(url, "drained: it had no work", to_stop=True)
        self._change(url, lifecycle=EngineLifecycle.DRAINING, draining_since=now, drain_by=by)
        return True

    def expel(self, url: str, reason: str, *, to_stop: bool = False) -> bool:
        """Give an engine no more work and no more weights."""
        lifecycle = self._lifecycle(url)
        if lifecycle is None:
            return False
        self.membership += lifecycle.is_alive
        to_stop = to_stop or self.by_url[url].to_stop
        self._change(url, lifecycle=EngineLifecycle.EXPELLED, loaded=-1, last_error=reason, to_stop=to_stop)
        return lifecycle is not EngineLifecycle.EXPELLED

    # --- details ---------------------------------------------------------------------------------------------------

    def _in(self, *lifecycles: EngineLifecycle) -> list[str]:
        return [record.url for record in self.records() if record.lifecycle in lifecycles and not record.pinned]

    def _lifecycle(self, url: str) -> EngineLifecycle | None:
        record = self.by_url.get(url)
        return None if record is None else record.lifecycle

    def _change(self, url: str, **fields: Any) -> None:
        if fields.get("lifecycle", EngineLifecycle.HEALTHY) not in _VERIFIED:
            fields["pinned"] = False
        self.by_url[url] = replace(self.by_url[url], **fields)

    def _was_member(self, url: str, membership: int) -> bool:
        record = self.by_url.get(url)
        return record is not None and record.lifecycle.is_alive and record.joined_at <= membership

    def _rejoin(self, url: str, reason: str) -> None:
        """It has no weights from the next membership on."""
        self._change(
            url,
            lifecycle=EngineLifecycle.JOINING,
            loaded=-1,
            joined_at=self.membership + 1,
            returns_at=0.0,
            last_error=reason,
        )

    def _mark_dirty(self, url: str, reason: str, *, spent: bool) -> bool:
        draining = self.by_url[url].lifecycle is EngineLifecycle.DRAINING
        self.membership += 1
        lifecycle = EngineLifecycle.EXPELLED if spent or draining else EngineLifecycle.DIRTY
        expulsions = self.by_url[url].expulsions + spent
        self._change(url, lifecycle=lifecycle, loaded=-1, last_error=reason, to_stop=draining, expulsions=expulsions)
        return True

    def _lose(self, url: str, reason: str, becomes: EngineLifecycle) -> bool:
        """A member has lost its weights, or itself; a draining one has nothing left to end."""
        lifecycle = self._lifecycle(url)
        if lifecycle is None or not lifecycle.is_alive:
            return False
        if lifecycle is EngineLifecycle.DRAINING:
            return self.expel(url, f"drained: {reason}", to_stop=True)
        if becomes is EngineLifecycle.JOINING:
            self._rejoin(url, reason)
        else:
            self._change(url, lifecycle=becomes, loaded=-1, last_error=reason)
        self.membership += 1
        return True
