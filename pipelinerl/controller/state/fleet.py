"""The engines of a run as the controller knows them: membership, loaded weights, and eligibility for work.

    joining ──weights, then canary──▶ healthy ◀──answers── suspect ──silence──▶ dead ──answers──▶ joining
       ▲ ◀──answers── dirty ◀── an update or the canary failed  └─misses a poll─▲
       └── new process, an operator, the same process after a wait ── expelled ◀── failed too often, removed, drained

| event           | joining         | healthy  | suspect  | draining | dirty    | dead     | expelled |
|-----------------|-----------------|----------|----------|----------|----------|----------|----------|
| `join` new life | joining         | joining  | joining  | expelled | joining  | joining  | joining  |
| `join` same life| –               | –        | –        | –        | –        | –        | – (rest) |
| `on_published`  | has its weights | healthy  | suspect  | draining | –        | –        | –        |
| `on_verified`   | healthy         | –        | –        | –        | –        | –        | –        |
| `canary_failed` | dirty, expelled | –        | –        | –        | –        | –        | –        |
| `publish_failed`| dirty, expelled | dirty, … | dirty, … | expelled | –        | –        | –        |
| `update_missed` | dirty           | dirty    | dirty    | expelled | –        | –        | –        |
| `on_missed_poll`| –               | suspect  | –        | –        | –        | –        | –        |
| `answered`      | –               | –        | healthy* | –        | joining  | joining  | –        |
| `on_timeout`    | dead            | dead     | dead     | expelled | dead     | –        | –        |
| `restarted`     | joining         | joining  | joining  | expelled | –        | –        | –        |
| `drain`         | draining        | draining | draining | –        | expelled | expelled | –        |
| `expel`         | expelled        | expelled | expelled | expelled | expelled | expelled | –        |
| `begin_epoch`   | joining         | joining  | joining  | draining | dirty    | dead     | expelled |

(*) joining if it has missed a publication meanwhile.

While another engine is healthy, a suspect engine is left out: its work moves to the others, and publications and prompt
orders continue without it.

Only healthy engines are given work. To become healthy, an engine needs `on_published` and then `on_verified` for the
same version: it must load the weights and pass the canary check, which compares its log-probs with the trainer's. An
engine that fails the check stays dirty until there is a newer version, as long as other engines serve.

The membership number grows whenever the set of engines that a publication must reach changes, since the ranks of a
process group cannot change. A report about an older membership says nothing about engines that joined later.

An engine asks to join repeatedly (`join`); its `incarnation` identifies its process, which the table calls a life. An
engine expelled for failures that may be temporary is readmitted after a waiting time (its rest), which doubles with
each expulsion. If processes at an address keep dying before they pass the canary check, the wait until the next process
is admitted doubles each time (`offer_wait_s`).

A healthy engine may be pinned for an evaluation: it keeps its weights, and serves only requests that name it. The pin
ends when the engine leaves the states healthy and suspect. A released engine rejoins unless its weights are the newest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from inference_contract.errors import Persistence


class EngineLifecycle(StrEnum):
    """Lifecycle state of an engine; decides whether it may be given work."""

    JOINING = "joining"
    """Waits for weights, or has received them and has yet to prove them in the canary check."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """A late answer to a poll: other engines take over the work, and no weights are sent until the engine answers."""
    DRAINING = "draining"
    """Finishes its current work and then leaves; until then its weights are kept up to date."""
    DIRTY = "dirty"
    """An update or the canary check failed, so its weights cannot be trusted. It rejoins once it answers a poll."""
    DEAD = "dead"
    EXPELLED = "expelled"
    """Failed too often in a row or for a permanent cause, or was removed or drained."""

    @property
    def is_alive(self) -> bool:
        """True if publications must reach an engine in this state, unless it is pinned."""
        return self in (
            EngineLifecycle.JOINING,
            EngineLifecycle.HEALTHY,
            EngineLifecycle.SUSPECT,
            EngineLifecycle.DRAINING,
        )


#: States of engines that have passed the canary check.
_VERIFIED: Final = (EngineLifecycle.HEALTHY, EngineLifecycle.SUSPECT)
#: States of engines that get no new work and may finish their current work.
_FINISHING: Final = (EngineLifecycle.JOINING, EngineLifecycle.DRAINING)

#: Seconds before another process is admitted at an address where two processes in a row died before passing the canary
#: check. Each further death doubles the wait, up to the longest.
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
#: Seconds until an engine expelled for failures may return; each expulsion doubles the time, up to the longest.
_FIRST_REST_S: Final = 30.0
_LONGEST_REST_S: Final = 600.0

_LOCALHOST: Final = re.compile(r"(?<=://)localhost(?=:|$)", re.IGNORECASE)


def base_url(engine: str) -> str:
    """Return the URL that identifies an engine in the fleet (with 127.0.0.1 for localhost); names stay unchanged."""
    return _LOCALHOST.sub("127.0.0.1", engine.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine; times are on the controller's clock.

    Attributes:
        incarnation: identifies one process of the engine; empty, like name and type, if an operator added the engine.
        joined_at: number of the first membership (set of the fleet's engines) that includes the engine; reports about
            earlier memberships say nothing about it.
        loaded: the version last published to the engine in this epoch; −1 if none.
        refused: the version with which the engine last failed the canary check, −1 if none; the engine does not get
            this version again while other engines serve.
        failed_updates, failed_checks: failures since the engine last passed the canary check. An unanswered check
            counts as a failed update.
        unproven_lives: consecutive earlier incarnations that ended without passing a canary check.
        expulsions: how often the engine was expelled for failures since it last passed the canary check.
        returns_at: when a failed or expelled engine may join again; the wait begins when the engine first answers a
            poll, or asks to join, after the failure. 0 before that time.
        to_stop: True if an operator removed the engine, so the launcher may end its process.
        refuses: True if the engine was expelled for a permanent cause: a retry is useless, a new process may help.
        pinned: True if the engine is excluded from publications and from regular work.
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
        """True if this engine was expelled for failures that may pass with time, so it may join again later."""
        return self.lifecycle is EngineLifecycle.EXPELLED and self.expulsions > 0 and not (self.refuses or self.to_stop)


@dataclass(slots=True)
class Fleet:
    """Engine records by sorted base URL. Pure: observations are arguments. Methods return True on a change."""

    by_url: dict[str, EngineRecord] = field(default_factory=dict)
    membership: int = 0
    updates_to_expulsion: int = 5
    checks_to_expulsion: int = 2

    def __post_init__(self) -> None:
        """Sort the records once; `join` keeps them sorted. Reads are far more frequent than joins."""
        self.by_url = dict(sorted(self.by_url.items()))

    def records(self) -> list[EngineRecord]:
        """Return all engines, by URL."""
        return list(self.by_url.values())

    def members(self) -> list[str]:
        """Return the engines that are alive and not pinned."""
        return [record.url for record in self.records() if record.lifecycle.is_alive and not record.pinned]

    def to_update(self) -> list[str]:
        """Return the members that a publication must reach: without suspect engines while another one is healthy."""
        suspects = set(self._in(EngineLifecycle.SUSPECT)) if self.serving() else set()
        return [url for url in self.members() if url not in suspects]

    def serving(self) -> list[str]:
        """Return the engines that may be given work."""
        return self._in(EngineLifecycle.HEALTHY)

    def finishing(self) -> list[str]:
        """Return engines that may finish their work but get no new work, except requests that name a pinned engine."""
        states = _FINISHING if self.serving() else (*_FINISHING, EngineLifecycle.SUSPECT)
        return [record.url for record in self.records() if record.lifecycle in states or record.pinned]

    def verified(self) -> list[str]:
        """Return the engines that count as capacity: the healthy ones or, without any, those that are suspect."""
        return self.serving() or self._in(EngineLifecycle.SUSPECT)

    def pinned(self) -> list[str]:
        """Return the engines that keep their weights and serve only requests that name them."""
        return [record.url for record in self.records() if record.pinned]

    def to_verify(self) -> list[str]:
        """Return the joining engines, which must pass the canary check after the next publication."""
        return self._in(EngineLifecycle.JOINING)

    def is_draining(self, url: str) -> bool:
        """Return True if the engine is being drained."""
        return self._lifecycle(url) is EngineLifecycle.DRAINING

    def oldest_loaded(self) -> int | None:
        """Return the oldest version on engines that count as capacity; None without any."""
        return min((self.by_url[url].loaded for url in self.verified()), default=None)

    def without_weights(self) -> list[str]:
        """Return the joining engines that have received no weights of this epoch (the current trainer)."""
        joining = (each for each in self.by_url.values() if each.lifecycle is EngineLifecycle.JOINING)
        return sorted(each.url for each in joining if each.loaded < 0)

    # --- joining ---------------------------------------------------------------------------------------------------

    def is_known(self, url: str, incarnation: str, *, name: str, type: str, now: float) -> bool:
        """Return True if this incarnation is known with this name and type, so that `join` would change nothing."""
        known = self.by_url.get(url)
        if known is None or (known.incarnation, known.name, known.type) != (incarnation, name, type):
            return False
        return not known.may_return or now < known.returns_at

    def namesake_of(self, url: str, name: str) -> str | None:
        """Return the URL of another live engine with this name; None if there is none, or if the name is empty."""
        alive = (each for each in self.by_url.values() if each.lifecycle.is_alive and each.url != url)
        return next((each.url for each in alive if name and each.name == name), None)

    def offer_wait_s(self, url: str, incarnation: str, *, now: float) -> float:
        """Return the seconds until a process may join at `url`; 0 unless earlier ones died before the canary check."""
        known = self.by_url.get(url)
        if known is None or not incarnation or known.incarnation in ("", incarnation):
            return 0.0
        if known.proven or known.to_stop or not known.unproven_lives:
            return 0.0
        wait_s = min(_FIRST_WAIT_S * 2 ** (known.unproven_lives - 1), _LONGEST_WAIT_S)
        return max(0.0, known.offered_at + wait_s - now)

    def join(self, url: str, incarnation: str = "", *, name: str = "", type: str = "", now: float = 0.0) -> bool:
        """Add an engine, or readmit an expelled engine. A dead engine returns by answering a poll instead.

        Engines call this repeatedly. `incarnation` identifies a process, since a new process has no weights; it is
        empty if an operator adds the engine.
        """
        known, unproven_lives = self.by_url.get(url), 0
        if known is not None:
            same_life = known.incarnation in ("", incarnation)
            repeated = same_life if incarnation else known.lifecycle is not EngineLifecycle.EXPELLED
            if repeated and known.may_return:
                return self._rested(known, now=now)
            if repeated:
                self._change(
                    url, incarnation=known.incarnation or incarnation, name=known.name or name, type=known.type or type
                )
                return False
            if known.lifecycle is EngineLifecycle.DRAINING:
                self._change(url, incarnation=incarnation)
                return self.expel(url, "it restarted while draining", to_stop=True)
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
        """Readmit an expelled engine and return True if its rest is over; its first request to join starts the rest."""
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
        """Begin the epoch of a new trainer: no engine has this trainer's weights, and a new process group is formed."""
        for url, record in list(self.by_url.items()):
            self._change(url, refused=-1)
            if record.lifecycle in (EngineLifecycle.JOINING, *_VERIFIED):
                self._rejoin(url, record.last_error)
            elif record.lifecycle is EngineLifecycle.DRAINING:
                self._change(url, loaded=-1)
        self.membership += 1

    # --- weights ---------------------------------------------------------------------------------------------------

    def on_published(self, url: str, version: int, *, membership: int) -> None:
        """Record that the engine has loaded `version`; ignored if it joined after the publication's `membership`."""
        # Do not reset the failure counts before the canary check: an engine might take weights but never answer a
        # check.
        if self._was_member(url, membership):
            self._change(url, loaded=version)

    def publish_failed(
        self, url: str, reason: str, *, membership: int, persistence: Persistence = Persistence.TRANSIENT
    ) -> bool:
        """Record a failed update: mark the engine dirty, or expel it after too many failures or a permanent one."""
        # A dirty engine is retried only after it answers a poll: a dead engine in the process group would stall the
        # others.
        if not self._was_member(url, membership):
            return False
        failures, lasts = self.by_url[url].failed_updates + 1, persistence is Persistence.PERMANENT
        self._change(url, failed_updates=failures, refuses=lasts)
        return self._mark_dirty(url, reason, spent=lasts or failures >= self.updates_to_expulsion)

    def update_missed(self, url: str, reason: str, *, membership: int) -> bool:
        """Record that the engine missed an update because of other engines; the failure is not counted against it."""
        return self._was_member(url, membership) and self._mark_dirty(url, reason, spent=False)

    def on_verified(self, url: str, version: int, *, membership: int) -> bool:
        """Record that the engine passed the canary check: with `version`, its log-probs match the trainer's."""
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
        """Record a failed canary check: the engine loaded `version`, but its log-probs differ from the trainer's.

        It is the check of an engine that joins, or the brief one of an engine that serves.
        """
        record = self.by_url.get(url)
        if record is None or not self._was_member(url, membership):
            return False
        if record.lifecycle not in (EngineLifecycle.JOINING, EngineLifecycle.HEALTHY):
            return False
        failures = record.failed_checks + 1
        spent = failures >= self.checks_to_expulsion
        self._change(url, refused=version, failed_checks=failures, refuses=spent)
        return self._mark_dirty(url, reason, spent=spent)

    def pin(self, url: str) -> None:
        """Pin a healthy engine: it keeps its weights and gets no regular work."""
        self._change(url, pinned=True)
        self.membership += 1

    def release(self, url: str, *, version: int) -> None:
        """Unpin the engine: it gets work immediately if it has the newest `version`, else once it has received it."""
        record = self.by_url.get(url)
        if record is None or not record.pinned:
            return
        self._change(url, pinned=False)
        if record.loaded != version:
            self._rejoin(url, record.last_error)
        self.membership += 1

    # --- polls -----------------------------------------------------------------------------------------------------

    def on_missed_poll(self, url: str) -> bool:
        """Mark a healthy engine as suspect: it is late to answer a poll."""
        if self._lifecycle(url) is not EngineLifecycle.HEALTHY:
            return False
        self._change(url, lifecycle=EngineLifecycle.SUSPECT, last_error="it does not answer polls")
        return True

    def answered(self, url: str, *, version: int, now: float = 0.0) -> bool:
        """Record an answer to a poll: a suspect engine becomes healthy again, a dead or dirty engine rejoins.

        A suspect engine that has missed a publication meanwhile rejoins, too.
        While other engines serve, an engine that failed the canary check waits for another `version`. An engine that
        never passed the check waits longer after each failure, since each retry forces the other engines into a new
        process group.
        """
        match self._lifecycle(url):
            case EngineLifecycle.SUSPECT if self._missed_a_publication(url):
                self._rejoin(url, "it missed an update while it did not answer polls")
                self.membership += 1
            case EngineLifecycle.SUSPECT:
                self._change(url, lifecycle=EngineLifecycle.HEALTHY, last_error="")
            case EngineLifecycle.DEAD | EngineLifecycle.DIRTY if (
                self.by_url[url].refused != version or not self.verified()
            ) and self._retry_is_due(url, now=now):
                self._rejoin(url, self.by_url[url].last_error)
                self.membership += 1
            case _:
                return False
        return True

    def _missed_a_publication(self, url: str) -> bool:
        newest = max((self.by_url[other].loaded for other in self.serving()), default=-1)
        return not self.by_url[url].pinned and self.by_url[url].loaded < newest

    def _retry_is_due(self, url: str, *, now: float) -> bool:
        """Return True if a failed engine may be retried; its wait begins at the first answer after the failure."""
        record = self.by_url[url]
        setbacks = record.failed_updates + record.unproven_lives
        if record.proven or setbacks < 2:
            return True
        if not record.returns_at:
            self._change(url, returns_at=now + min(_FIRST_WAIT_S * 2 ** (setbacks - 2), _LONGEST_WAIT_S))
        return now >= self.by_url[url].returns_at

    def on_timeout(self, url: str, reason: str) -> bool:
        """Mark the engine as dead: it has not answered for too long. A dirty engine is lost already: return False."""
        if self._lifecycle(url) is EngineLifecycle.DIRTY:
            self._change(url, lifecycle=EngineLifecycle.DEAD, last_error=reason)
        return self._lose(url, reason, EngineLifecycle.DEAD)

    def restarted(self, url: str) -> bool:
        """Record that the engine's process lost its weights, for example by a restart; the engine must rejoin."""
        record = self.by_url.get(url)
        if record is None or record.loaded < 0:
            return False
        return self._lose(url, "it restarted", EngineLifecycle.JOINING)

    # --- leaving ---------------------------------------------------------------------------------------------------

    def drain(self, url: str, *, now: float, by: float) -> bool:
        """Give the engine no more work; its current work may run until the time `by`."""
        lifecycle = self._lifecycle(url)
        if lifecycle in (EngineLifecycle.DRAINING, EngineLifecycle.EXPELLED, None):
            return False
        if not lifecycle.is_alive:
            return self.expel(url, "drained: it had no work", to_stop=True)
        self._change(url, lifecycle=EngineLifecycle.DRAINING, draining_since=now, drain_by=by)
        return True

    def expel(self, url: str, reason: str, *, to_stop: bool = False) -> bool:
        """Exclude the engine from work and publications; with `to_stop`, the launcher also ends its process."""
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
        """Set an engine that died or lost its weights to the state `becomes`, or expel it if it was draining."""
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
