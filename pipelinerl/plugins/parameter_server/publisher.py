"""`PullPublisher`: uploads weights to parameter servers, from which each engine fetches them independently.

    upload to the servers ─▶ per engine: PREPARE (starts the fetch) ─▶ COMMIT ─▶ report engines' versions to the servers
                          └▶ or one announcement, for all engines that follow it ┘

Engines do not wait for one another, and an engine that fails or dies does not delay the others. Afterwards each engine
serves the old weights or the new ones, and the report says which. An engine whose server fails mid-transfer is retried
while time remains, from another replica or from the restarted server. Engines are spread evenly over the replicas of
each shard (RLAX paper, §3), and fetch all shards concurrently.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a parameter server, and room on it | the server; the engines' progress | the publication's timeout |
| PREPARE and COMMIT of an engine | the engine | its grace (`weights/grace.py`), once another engine serves |
| engines that received an announcement | their answers | the publication's timeout, or the announcer's if shorter |
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from inference_contract.errors import ContractError, DeadlineExceeded, DigestMismatch, NotPrepared, PeerLost
from inference_contract.weights import (
    Transport,
    UpdatePhase,
    UpdateStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.errors import DeadlineError, NotUploaded, PipelineError, RecipeError, UpdateError
from pipelinerl.plugins.parameter_server.connection import Key
from pipelinerl.plugins.parameter_server.upload import Uploaded, Uploader
from pipelinerl.roles.process import Identity
from pipelinerl.streams.stream import Stream
from pipelinerl.system.background import in_background, settled
from pipelinerl.training.publishing import StreamAnnouncer
from pipelinerl.weights.engine_control import EngineControl, Failure, Preparation, lasting
from pipelinerl.weights.grace import Grace, update_kind
from pipelinerl.weights.publisher import Publication, PublicationProgress, PublishReport

log = logging.getLogger("pipelinerl")

#: Errors that are not the engine's fault: its parameter server was lost or late, or sent wrong bytes.
_SERVER_FAILED: Final = (PeerLost, DeadlineExceeded, DigestMismatch)
#: Number of attempts per engine in one publication.
_ATTEMPTS: Final = 3
#: If an announcement would have to exclude more engines than it serves, up to this many engines get requests instead
#: of the announcement.
_FEW: Final = 64
#: Time limit in seconds for the report to the servers; if it fails, the next publication reports again.
_CONFIRM_S: Final = 5.0


def publisher_of(identity: Identity, control: EngineControl, stream: Stream, grace: Grace) -> PullPublisher:
    """Return the publisher of the transport `pull`; raise `RecipeError` if the recipe names no parameter server."""
    servers, weights = identity.config.parameter_server, identity.config.weights
    if not servers.urls:
        raise RecipeError(
            "weights.transport is pull, and no parameter server is named; name them with --set "
            "'parameter_server.urls=[\"http://host:port\"]', as the launcher does"
        )
    announcer = StreamAnnouncer(stream, grace=grace) if weights.announced_to(identity.config.engine.count) else None
    uploader = Uploader(servers.urls, shards=servers.shards, token=identity.token)
    return PullPublisher(control, uploader, announcer=announcer, grace=grace)


class PullPublisher:
    """A `Publisher` that uses parameter servers. Only one publication runs at a time; concurrent calls wait."""

    def __init__(
        self,
        control: EngineControl,
        placement: Uploader,
        *,
        announcer: StreamAnnouncer | None = None,
        grace: Grace | None = None,
    ) -> None:
        self._control = control
        self._announcer = announcer
        self._known: set[str] = set()
        self._placement = placement
        self._grace = Grace() if grace is None else grace
        self._preparation = Preparation(control, on_restart=self._grace.forget)
        self._confirmed: dict[str, Key] = {}
        self._turn = asyncio.Lock()

    async def publish(self, publication: Publication) -> PublishReport:
        """Send the weights to every engine that can take them. Raises NotUploaded, UpdateError if no engine serves
        them, with reasons, and FencedError if a later trainer process took over.
        """
        async with self._turn:
            progress = PublicationProgress(publication)
            try:
                for attempt in range(1, _ATTEMPTS + 1):
                    try:
                        uploaded = await self._uploaded(progress)
                    except UpdateError as error:
                        if attempt == 1:
                            raise NotUploaded(str(error)) from error
                        # The engines that an earlier attempt has not served lost their parameter server, and are not
                        # at fault.
                        progress.blameless |= set(progress.targets)
                        progress.failed |= dict.fromkeys(progress.targets, str(error))
                        break
                    await self._serve(progress, uploaded, is_last=attempt == _ATTEMPTS)
                    if not progress.targets:
                        break
            finally:
                await self._confirm(progress)
            return progress.report()

    async def close(self) -> None:
        self._placement.close()

    async def _uploaded(self, progress: PublicationProgress) -> Uploaded:
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
        answers |= await self._grace.each(
            update_kind(progress.publication.on_update),
            [url for url in progress.targets if url not in answers],
            lambda url: self._update(progress, uploaded, url, _turned(uploaded, order[url])),
            engines=len(progress.publication.engines),
            others=bool(answers or progress.pauses_s),
        )
        progress.permanent |= lasting(answers)
        again = []
        for url, answer in answers.items():
            if not isinstance(answer, Exception):
                progress.pauses_s[url] = answer.pause_s
            elif isinstance(answer, _SERVER_FAILED) and not is_last and time.monotonic() < progress.deadline:
                log.warning("retrying engine %s: %s", url, answer)
                again.append(url)
            else:
                progress.failed[url] = str(answer)
        progress.targets = again

    async def _announced(
        self, progress: PublicationProgress, uploaded: Uploaded
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """Announce the version; return answers by URL. {} without an announcer, or for too few engines to be worth it;
        engines that need the layout are missing, as they need a request.
        """
        if self._announcer is None:
            return {}
        publication = progress.publication
        left_out, self._known = self._known - set(publication.engines), self._known | set(publication.engines)
        if len(progress.targets) <= min(_FEW, len(left_out) - 1):
            return {}  # requests cost less if few engines are targets, for example one that joins
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
        """Report to the servers what each engine serves; the servers then keep no versions for engines that failed."""
        publication = progress.publication
        key = (publication.epoch, publication.version)
        self._confirmed = dict.fromkeys(progress.pauses_s, key)
        members: dict[str, Key | None] = dict(self._confirmed)
        deadline = time.monotonic() + _CONFIRM_S
        confirming = in_background(
            "confirm", lambda: self._placement.confirm(publication.epoch, members, deadline=deadline)
        )
        if await settled(confirming, timeout_s=_CONFIRM_S + 1.0) and isinstance(confirming.exception(), PipelineError):
            log.warning("the parameter servers did not learn which engines serve %s: %s", key, confirming.exception())


def _turned(uploaded: Uploaded, number: int) -> dict[str, Any]:
    """Return the fields of PREPARE that name the servers, in an order rotated by `number` to spread engines evenly."""
    turned = [(*urls[at:], *urls[:at]) for urls in uploaded.sources for at in [number % len(urls)]]
    return {"sources": turned[0]} if len(turned) == 1 else {"shards": turned, "bucket_bytes": uploaded.bucket_bytes}
