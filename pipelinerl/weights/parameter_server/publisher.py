"""`PullPublisher`: takes weights to engines through parameter servers, from which each engine fetches on its own.

    place on the servers ─▶ per engine: PREPARE (it begins to fetch) ─▶ COMMIT ─▶ tell the servers who serves what
                         └▶ or one announcement, for all engines that follow it ┘

Promises: engines do not wait for one another, and one that fails or dies costs the others nothing; an engine ends with
the old weights or the new, and the report says which; one that lost its server in the middle is tried again while time
remains, from another replica or from the server's next life. Engines are mapped evenly to the replicas of each shard
(RLAX §3), and fetch from all shards at once.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a parameter server, and room on it | the server; the engines' progress | the publication's timeout |
| PREPARE, COMMIT | the engine | the rest of it |
| engines that were told by an announcement | they answer | the rest of it, or the announcer's patience |
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, final

from inference_contract.errors import ContractError, DeadlineExceeded, DigestMismatch, NotPrepared, PeerLost
from inference_contract.weights import Transport, UpdatePhase, UpdateStatus, WeightUpdateRequest, WeightUpdateResponse
from pipelinerl.errors import DeadlineError, PipelineError, ReachedNoEngine, UpdateError
from pipelinerl.system.background import in_background, settled
from pipelinerl.weights.engine_control import Announcer, EngineControl, Preparation
from pipelinerl.weights.fan_out import Failure, each, lasting
from pipelinerl.weights.parameter_server.retention import Key
from pipelinerl.weights.parameter_server.upload import Uploaded, Uploader
from pipelinerl.weights.publisher import Publication, PublicationProgress, PublishReport

log = logging.getLogger("pipelinerl")

#: The engine is not to blame for these: its server was lost, late, or gave it wrong bytes.
_SERVER_FAILED: Final = (PeerLost, DeadlineExceeded, DigestMismatch)
#: How often an engine is tried in one publication.
_ATTEMPTS: Final = 3
#: So many engines at most are asked one by one where more than they would read an announcement that is not for them.
_FEW: Final = 64
#: Longest wait to tell servers who serves what; they hear it again with the next publication.
_CONFIRM_S: Final = 5.0


@final
class PullPublisher:
    """Satisfies `Publisher`. One publication runs at a time; others wait their turn."""

    def __init__(self, control: EngineControl, placement: Uploader, *, announcer: Announcer | None = None) -> None:
        """With an `announcer`, engines that follow announcements are told by it, and the others by requests."""
        self._control = control
        self._announcer = announcer
        self._known: set[str] = set()
        self._placement = placement
        self._preparation = Preparation(control)
        self._confirmed: dict[str, Key] = {}
        self._turn = asyncio.Lock()

    async def publish(self, publication: Publication) -> PublishReport:
        """Serve the weights from every engine that can be; see `Publisher`.

        Raises:
            UpdateError: no engine serves them; the message names each with its reason.
            FencedError: a trainer of a later epoch has taken the servers over.
        """
        async with self._turn:
            now = time.monotonic()
            targets = list(dict.fromkeys(publication.engines))
            progress = PublicationProgress(publication, list(targets), now + publication.timeout_s, now)
            try:
                await self._attempts(progress)
            finally:
                await self._confirm(progress)
            if targets and not progress.pauses_s:
                reasons = "; ".join(f"{url} {reason}" for url, reason in progress.failed.items())
                raise ReachedNoEngine(
                    f"weights {publication.epoch}.{publication.version} reached no engine: {reasons}",
                    failed=progress.failed,
                    permanent=frozenset(progress.permanent),
                )
            return progress.report()

    async def close(self) -> None:
        """Close the connections; engines and servers keep what they have."""
        self._placement.close()

    async def _attempts(self, progress: PublicationProgress) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                uploaded = await self._uploaded(progress)
            except UpdateError as error:
                if not progress.pauses_s:
                    raise
                progress.failed |= dict.fromkeys(progress.targets, str(error))  # of those alone that are not served yet
                return
            await self._serve(progress, uploaded, is_last=attempt == _ATTEMPTS)
            if not progress.targets:
                return

    async def _uploaded(self, progress: PublicationProgress) -> Uploaded:
        """The version on the servers, which are told who is going to fetch it."""
        publication, began = progress.publication, time.monotonic()
        members = {url: self._confirmed.get(url) for url in progress.publication.engines if url not in progress.failed}
        placing = in_background(
            "place", lambda: self._placement.upload(publication, members, deadline=progress.deadline)
        )
        if not await settled(placing, timeout_s=progress.remaining_s + 1.0):
            raise UpdateError(f"the parameter servers have not taken the version within {publication.timeout_s:g} s")
        try:
            uploaded = placing.result()
        except (ContractError, DeadlineError) as error:
            raise UpdateError(f"the version was not uploaded: {error}") from error
        progress.send_s += time.monotonic() - began
        progress.digest = uploaded.digest
        for url, reason in uploaded.failed.items():
            log.warning("parameter server %s does not hold version %d: %s", url, publication.version, reason)
        return uploaded

    async def _serve(self, progress: PublicationProgress, uploaded: Uploaded, *, is_last: bool) -> None:
        order = {url: number for number, url in enumerate(progress.targets)}
        answers = await self._announced(progress, uploaded)
        answers |= await each(
            [url for url in progress.targets if url not in answers],
            lambda url: self._update(progress, uploaded, url, _turned(uploaded, order[url])),
        )
        progress.permanent |= lasting(answers)
        again = []
        for url, answer in answers.items():
            if not isinstance(answer, Exception):
                progress.pauses_s[url] = answer.pause_s
            elif isinstance(answer, _SERVER_FAILED) and not is_last and time.monotonic() < progress.deadline:
                log.warning("engine %s is tried again: %s", url, answer)
                again.append(url)
            else:
                progress.failed[url] = str(answer)
        progress.targets = again

    async def _announced(
        self, progress: PublicationProgress, uploaded: Uploaded
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """What became of those engines that follow announcements. Who has not seen the layout needs a request."""
        if self._announcer is None:
            return {}
        publication = progress.publication
        left_out, self._known = self._known - set(publication.engines), self._known | set(publication.engines)
        if len(progress.targets) <= min(_FEW, len(left_out) - 1):
            return {}  # to one that joins, for example
        prepare = self._request(
            progress, uploaded, UpdatePhase.PREPARE, layout_id=publication.layout.layout_id, **_turned(uploaded, 0)
        )
        answers = await self._announcer.tell(
            prepare, progress.targets, left_out=sorted(left_out), deadline=progress.deadline
        )
        return {url: answer for url, answer in answers.items() if not isinstance(answer, NotPrepared)}

    @staticmethod
    def _request(
        progress: PublicationProgress, uploaded: Uploaded, phase: UpdatePhase, **named: Any
    ) -> WeightUpdateRequest:
        publication = progress.publication
        return WeightUpdateRequest(
            phase=phase,
            version=publication.version,
            epoch=publication.epoch,
            on_update=publication.on_update,
            transport=Transport.PULL,
            digest=uploaded.digest,
            timeout_s=progress.remaining_s,
            **named,
        )

    async def _update(
        self, progress: PublicationProgress, uploaded: Uploaded, url: str, sources: dict[str, Any]
    ) -> WeightUpdateResponse:
        prepared = await self._preparation.prepare(
            url,
            progress.publication.layout,
            lambda **layout: self._request(progress, uploaded, UpdatePhase.PREPARE, **sources, **layout),
        )
        if prepared.status is UpdateStatus.ALREADY_SERVING:
            return prepared
        commit = self._request(progress, uploaded, UpdatePhase.COMMIT)
        return await self._control.request_weight_update(url, commit)

    async def _confirm(self, progress: PublicationProgress) -> None:
        """Servers hear what each engine serves now, and that they need not wait for those that failed."""
        publication = progress.publication
        key = (publication.epoch, publication.version)
        self._confirmed = dict.fromkeys(progress.pauses_s, key)
        members: dict[str, Key | None] = dict(self._confirmed)
        deadline = time.monotonic() + _CONFIRM_S
        telling = in_background(
            "confirm", lambda: self._placement.confirm(publication.epoch, members, deadline=deadline)
        )
        if await settled(telling, timeout_s=_CONFIRM_S + 1.0) and isinstance(telling.exception(), PipelineError):
            log.warning("the parameter servers were not told who serves %s: %s", key, telling.exception())


def _turned(uploaded: Uploaded, number: int) -> dict[str, Any]:
    """The fields of PREPARE that say where to fetch from: sources in order, beginning with another for each engine."""
    turned = [(*urls[at:], *urls[:at]) for urls in uploaded.sources for at in [number % len(urls)]]
    return {"sources": turned[0]} if len(turned) == 1 else {"shards": turned, "bucket_bytes": uploaded.bucket_bytes}
