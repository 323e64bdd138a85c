"""`BroadcastPublisher`: sends the trainer's weights to all engines together, through a process group that it leads.

    form the group (only if it changed) ─▶ PREPARE to all engines ─▶ broadcast, bucket by bucket ─▶ COMMIT to all

No byte is sent before every engine has accepted the manifest. The model is never copied as a whole: one bucket is
staged at a time, and hashed as it is sent. Afterwards each engine serves either the old weights or the new ones, and
the report says which.

An engine that rejects the update, is unreachable, dies or hangs is reported as failed. The remaining engines are
served in the same publication by a new generation of the group, so that one engine with a different model cannot block
the fleet. If a group fails to form, its rendezvous is closed, so engines that wait there for a missing engine fail
immediately. Engines that failed only because of other engines are reported as blameless.

An engine may also freeze: its connections stay open, and it answers nothing. While it holds up a publication, no engine
gets weights and the trainer cannot step. Each wait for it therefore ends after a grace, measured from earlier
publications (`weights/grace.py`): three times the usual time, at least 2 s with two engines and 0.5 s with eight.

| who     | waits for            | unblocked by          | or, at the latest                                     |
|---------|----------------------|-----------------------|-------------------------------------------------------|
| trainer | all ranks to join    | the engines           | the grace for joins + 1 s; silent engines are dropped |
| trainer | PREPARE              | each engine           | its grace, once another engine has answered           |
| trainer | a piece to be taken  | the ranks it sends to | the grace for pieces; then it sends ABORT             |
| trainer | COMMIT               | each engine           | its grace; then it sends ABORT                        |
| trainer | ABORT                | each engine           | its grace for PREPARE; silent engines are dropped     |
| engine  | a piece              | the rank that sends   | PREPARE's timeout: the graces for piece and PREPARE   |
| engine  | its dropped transfer | the line above        | so PREPARE of a retry has that much more time         |

Without history, each limit is the group's timeout: a third of the publication's, or `_PIECE_S` for a piece that the
trainer sends. COMMIT with `drain` waits for sequences to end, so it has only the publication's timeout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from inference_contract.errors import (
    ContractError,
    DeadlineExceeded,
    EngineStopped,
    NotPrepared,
    Overloaded,
    PeerLost,
    StaleGeneration,
)
from inference_contract.weights import (
    MOST_GENERATION,
    Backend,
    Connections,
    InitProcessGroupRequest,
    OnUpdate,
    UpdatePhase,
    UpdateStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.errors import DeadlineError, EngineUnreachable, PipelineError, UpdateError
from pipelinerl.system.background import in_background, in_background_soon, settled
from pipelinerl.system.machine import address_facing
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous
from pipelinerl.weights.broadcast.sender import WeightSender
from pipelinerl.weights.engine_control import EngineControl, Failure, Preparation, each, each_until_failure, lasting
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import Publication, PublicationProgress, PublishReport

log = logging.getLogger("pipelinerl")

#: Name of the process group.
_GROUP: Final = "weights"
#: Distance between the first generation numbers of consecutive epochs (trainer processes). The numbers increase with
#: (epoch, membership, attempt), so a restarted trainer's numbers are above those of the process that it replaces.
_EPOCH_STEP: Final = 2**40
_MEMBERSHIP_STEP: Final = 2**12

#: Time limit in seconds for one piece of a broadcast. A piece takes milliseconds, but gloo may wait for a dead engine.
_PIECE_S: Final = 10.0

#: Longest time in seconds to leave a group; the abort of an NCCL group ends within 5 s.
_LEAVES_S: Final = 10.0

#: Groups with more ranks than this connect only along the broadcast tree. 64 engines then join in 0.1 s instead of 1 s,
#: and each has a tenth of the connections.
_EACH_TO_EACH: Final = 9

#: Errors of an engine that was waiting for another engine; that other engine is the cause.
_VICTIM = (DeadlineExceeded, PeerLost)


@dataclass(frozen=True, slots=True)
class _EngineGroup:
    collective: Collective
    generation: int
    membership: tuple[int, int]
    members: tuple[str, ...]


class BroadcastPublisher:
    """A `Publisher` that broadcasts. Only one publication runs at a time; concurrent calls of `publish` wait."""

    def __init__(
        self,
        control: EngineControl,
        *,
        host: str | None = None,
        backend: Backend = Backend.GLOO,
        bucket_bytes: int = 16 * 2**20,
        grace: Grace | None = None,
    ) -> None:
        """Create the publisher. `host` is this machine's address for engines; None detects it."""
        self._control = control
        self._grace = Grace() if grace is None else grace
        self._preparation = Preparation(control, on_restart=self._grace.forget)
        self._host = host
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._rendezvous: Rendezvous | None = None
        self._group: _EngineGroup | None = None
        self._left: Future[None] | None = None
        self._generation = -1
        self._turn = asyncio.Lock()

    async def publish(self, publication: Publication) -> PublishReport:
        async with self._turn:
            progress = PublicationProgress(publication)
            if not progress.targets:
                sender = WeightSender(publication.layout, publication.weights, self._bucket_bytes)
                progress.digest = await self._sent(progress, sender, None)
            try:
                while progress.targets:
                    await self._attempt(progress)
            except BaseException:
                self._leave()
                raise
            return progress.report()

    async def close(self) -> None:
        self._leave()
        if self._left is not None:
            await settled(self._left, timeout_s=_LEAVES_S)
        self._close_rendezvous()

    async def _attempt(self, progress: PublicationProgress) -> None:
        group = await self._formed(progress)
        if group is None or not await self._prepared(progress, group):
            return
        publication = progress.publication
        sender = WeightSender(publication.layout, publication.weights, self._bucket_bytes)
        try:
            progress.digest = await self._sent(progress, sender, group.collective)
        except (UpdateError, DeadlineError) as error:
            await self._abandon(progress, str(error), can_retry=sender.broke_in_group)
            return
        await self._commit(progress, group)

    # --- the group -----------------------------------------------------------------------------------------------

    async def _formed(self, progress: PublicationProgress) -> _EngineGroup | None:
        publication, members = progress.publication, tuple(progress.targets)
        membership = (publication.epoch, publication.membership)
        known = self._group
        if known is not None and known.members == members and known.membership == membership:
            return known
        self._leave()
        floor = publication.epoch * _EPOCH_STEP + publication.membership * _MEMBERSHIP_STEP % _EPOCH_STEP
        self._generation = generation = max(self._generation + 1, floor)
        host = await asyncio.to_thread(address_facing, members) if self._host is None else self._host
        if self._rendezvous is not None and self._rendezvous.host != host:
            self._close_rendezvous()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(host)
        meeting = self._rendezvous
        began, timeout_s = time.monotonic(), self._grace_s("a join", members, progress)
        requests, own = self._joins(meeting, members, generation, timeout_s)
        answers = await each_until_failure(
            members, lambda url: self._control.init_process_group(url, requests[url]), victim=_VICTIM
        )
        failures = {url: answer for url, answer in answers.items() if isinstance(answer, Exception)}
        if not failures and await settled(own, timeout_s=progress.remaining_s) and own.exception() is None:
            for url in members:
                self._grace.note("a join", url, time.monotonic() - began)
            self._group = _EngineGroup(own.result(), generation, membership, members)
            return self._group
        # Without this call, all ranks that have joined would wait for the missing rank until their deadlines.
        self._close_rendezvous()

        def close_joined() -> None:
            if own.exception() is None:
                own.result().close()

        own.add_done_callback(lambda _: in_background_soon(f"leave-{generation}", close_joined))
        if self._goes_above(failures, progress):
            return None
        culprits = {url: error for url, error in failures.items() if not isinstance(error, _VICTIM)} or failures
        for url in culprits:
            self._grace.was_late("a join", url, timeout_s)
        progress.permanent |= lasting(culprits)
        # An engine reports overload while its joins of earlier, failed groups are pending. It did not cause those
        # failures.
        progress.blameless |= {url for url, error in culprits.items() if isinstance(error, Overloaded)}
        progress.drop({url: f"did not join: {error}" for url, error in culprits.items()})
        if not failures:
            progress.blameless |= set(members)
            progress.drop(dict.fromkeys(members, f"rank 0 could not join: {own.exception() if own.done() else 'late'}"))
        return None

    def _goes_above(self, failures: Mapping[str, object], progress: PublicationProgress) -> bool:
        """Return True, once per publication, if every failed engine rejected the group's generation as too low: the
        next goes above the highest reported. False if a later trainer process has taken over, by a higher epoch.
        """
        # If a later trainer process had formed the higher generation, the engines would report its epoch. Otherwise the
        # generation is no trainer's, and this trainer may go above it. The generation is raised once per publication;
        # an engine that then reports a generation that is higher still is dropped.
        reported = [error.known for error in failures.values() if isinstance(error, StaleGeneration)]
        if progress.raised or not reported or len(reported) < len(failures):
            return False
        epoch, generation = (max(known.get(name, 0) for known in reported) for name in ("epoch", "generation"))
        if epoch > progress.publication.epoch or not self._generation <= generation < MOST_GENERATION - 1:
            return False
        log.warning(
            "engines have joined generation %d of the weight group, which is not ours: using a higher one", generation
        )
        progress.raised, self._generation = True, generation
        return True

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _joins(
        self, meeting: Rendezvous, members: Sequence[str], generation: int, timeout_s: float
    ) -> tuple[dict[str, InitProcessGroupRequest], Future[Collective]]:
        """Return the request for each engine to join, and this process's own join, which has begun."""
        size, left = 1 + len(members), self._left
        is_tree = self._backend is Backend.GLOO and size > _EACH_TO_EACH
        common: dict[str, Any] = {
            "group": _GROUP,
            "backend": self._backend,
            "world_size": size,
            "generation": generation,
            "connections": Connections.TREE if is_tree else None,
            "timeout_s": timeout_s,
        }
        requests = {
            url: InitProcessGroupRequest(
                rendezvous_host=meeting.host, rendezvous_port=meeting.port, rank=rank, **common
            )
            for rank, url in enumerate(members, start=1)
        }

        def join() -> Collective:
            if self._backend is Backend.NCCL and left is not None:
                wait([left], timeout=_LEAVES_S)  # an NCCL group holds GPU memory until it is left
            return Collective.join(host=meeting.host, port=meeting.port, rank=0, **common)

        return requests, in_background(f"join-{generation}", join)

    def _leave(self) -> None:
        """Leave the group on another thread: gloo takes 10 ms and NCCL up to 5 s, which would block the event loop."""
        if self._group is not None:
            self._left = in_background_soon(f"leave-{self._group.generation}", self._group.collective.close)
            self._group = None

    # --- the phases ----------------------------------------------------------------------------------------------

    def _request(self, progress: PublicationProgress, phase: UpdatePhase, **fields: Any) -> WeightUpdateRequest:
        publication = progress.publication
        return WeightUpdateRequest(
            phase=phase,
            version=publication.version,
            epoch=publication.epoch,
            on_update=publication.on_update,
            bucket_bytes=self._bucket_bytes,
            **{"timeout_s": _group_timeout_s(progress), **fields},
        )

    async def _prepared(self, progress: PublicationProgress, group: _EngineGroup) -> bool:
        """Send PREPARE; return True if all targets accept, else leave the group and abort the update. Engines that
        failed, or already serve the version, are no longer targets.
        """
        layout, made = progress.publication.layout, dict[str, WeightUpdateRequest]()
        silence_s = self._grace_s("a piece", [""], progress) + self._grace_s("PREPARE", group.members, progress)
        silence_s = min(silence_s, _group_timeout_s(progress))

        def request(**named: Any) -> WeightUpdateRequest:
            # Only two different requests are built: for engines that know the layout, and for engines that do not.
            (how,) = named
            if how not in made:
                pieces_key = f"pieces-{progress.publication.name}"
                where = {"group": _GROUP, "generation": group.generation, "pieces_key": pieces_key}
                made[how] = self._request(progress, UpdatePhase.PREPARE, timeout_s=silence_s, **where, **named)
            return made[how]

        answers = await self._each(
            "PREPARE" if not progress.broke else "PREPARE after a failed broadcast",
            progress,
            lambda url: self._preparation.prepare(url, layout, request),
        )
        errors = {url: answer for url, answer in answers.items() if isinstance(answer, Exception)}
        accepted = {url: answer for url, answer in answers.items() if not isinstance(answer, Exception)}
        served = {url: a for url, a in accepted.items() if a.status is UpdateStatus.ALREADY_SERVING}
        if not errors and not served:
            return True
        self._leave()
        await self._aborted(progress, accepted.keys() - served.keys())
        for url, answer in served.items():
            progress.pauses_s[url] = 0.0
            progress.digest = progress.digest or answer.digest or ""
        progress.permanent |= lasting(errors)
        for url, error in errors.items():
            lost = isinstance(error, EngineStopped) or not isinstance(error, ContractError)
            progress.drop({url: f"{'was lost at prepare' if lost else 'refused'}: {error}"})
        progress.targets = [url for url in progress.targets if url not in served]
        return False

    async def _sent(self, progress: PublicationProgress, sender: WeightSender, group: Collective | None) -> str:
        began, longest_s = time.monotonic(), min(progress.publication.timeout_s / 3, _PIECE_S)
        silence_s = min(longest_s, self._grace_s("a piece", [""], progress))
        sending = in_background(
            f"send-{progress.publication.name}",
            lambda: sender.send(
                group, deadline=progress.deadline, silence_s=silence_s, pieces_key=f"pieces-{progress.publication.name}"
            ),
        )
        if not await settled(sending, timeout_s=progress.remaining_s + 1.0):
            raise DeadlineError(f"the broadcast has not ended within {progress.publication.timeout_s:g} s")
        progress.send_s = time.monotonic() - began
        self._grace.note("a piece", "", sender.longest_s)
        return sending.result()

    async def _commit(self, progress: PublicationProgress, group: _EngineGroup) -> None:
        # In mode `drain`, an engine answers only after its sequences have ended, so it may be silent for longer.
        drains = progress.publication.on_update is OnUpdate.DRAIN
        patience = progress.remaining_s if drains else _group_timeout_s(progress)
        request = self._request(progress, UpdatePhase.COMMIT, digest=progress.digest, timeout_s=patience)
        answers = await self._each(
            "COMMIT with drain" if drains else "COMMIT",
            progress,
            lambda url: self._control.request_weight_update(url, request),
        )
        served = {url: answer.pause_s for url, answer in answers.items() if not isinstance(answer, Exception)}
        errors = {url: answer for url, answer in answers.items() if isinstance(answer, Exception)}
        progress.pauses_s |= served
        progress.targets = list(errors)
        if errors:
            self._leave()
        progress.permanent |= lasting(errors)
        # Gloo forwards bytes along a tree: an engine below a dead one has missed bytes, so it is retried.
        missed = {url for url, error in errors.items() if isinstance(error, _VICTIM)}
        # Those below a frozen one wait for its bytes and are as silent as it is, but they answer ABORT.
        silent = [url for url, error in errors.items() if isinstance(error, PipelineError)]
        missed |= {url for url, answer in (await self._aborted(progress, silent)).items() if _is_alive(answer)}
        progress.broke = progress.broke or bool(silent)
        hopeless = len(missed) == len(answers) or time.monotonic() > progress.deadline
        progress.drop(
            {url: f"did not commit: {error}" for url, error in errors.items() if hopeless or url not in missed}
        )

    async def _abandon(self, progress: PublicationProgress, reason: str, *, can_retry: bool) -> None:
        self._leave()
        answers = await self._aborted(progress, progress.targets)
        lost = {url: f"was lost in the broadcast: {reason}" for url, answer in answers.items() if not _is_alive(answer)}
        progress.drop(lost)
        # An engine process that was restarted meanwhile answers at the same URL, but does not know the update.
        restarted = {url for url, answer in answers.items() if isinstance(answer, NotPrepared)}
        hopeless, progress.broke = progress.broke and not lost, True
        if hopeless or not can_retry or time.monotonic() > progress.deadline:
            progress.blameless |= set(progress.targets) - restarted if restarted else set()
            progress.drop(dict.fromkeys(progress.targets, f"the broadcast failed: {reason}"))

    async def _aborted(
        self, progress: PublicationProgress, urls: Iterable[str]
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """Send ABORT; an engine answers it at once, whatever it waits for, so silence means that it is lost."""
        request = self._request(progress, UpdatePhase.ABORT, timeout_s=min(2.0, progress.publication.timeout_s))

        async def abort(url: str) -> WeightUpdateResponse:
            within_s = self._grace_s("PREPARE", [url], progress)  # the usual time of an answer
            try:
                async with asyncio.timeout(within_s):
                    return await self._control.request_weight_update(url, request)
            except TimeoutError:
                raise EngineUnreachable(f"it did not answer ABORT within {within_s:.1f} s") from None

        return await each(urls, abort)

    # --- the time of each engine ---------------------------------------------------------------------------------

    def _grace_s(self, what: str, urls: Iterable[str], progress: PublicationProgress) -> float:
        engines = len(progress.publication.engines)
        return self._grace.of(what, urls, engines=engines, most_s=_group_timeout_s(progress))

    async def _each(
        self, what: str, progress: PublicationProgress, call: Callable[[str], Awaitable[WeightUpdateResponse]]
    ) -> dict[str, WeightUpdateResponse | Failure]:
        return await self._grace.each(what, progress.targets, call, engines=len(progress.publication.engines))


def _is_alive(answer: WeightUpdateResponse | Failure) -> bool:
    """Return True if the engine answered, though perhaps with an error."""
    return not isinstance(answer, PipelineError)


def _group_timeout_s(progress: PublicationProgress) -> float:
    """Return for how many seconds an engine may be silent: at most a third of the timeout, to allow a retry."""
    return min(progress.publication.timeout_s / 3, progress.remaining_s)
