"""`AnnouncedUpdates`: follows the trainer's announcements of new weights, pulls each version, and reports the result.

    trainer ── `announcements`: PREPARE, once for all ──▶ engine: PREPARE, pull, COMMIT ── `taken` ──▶ trainer

`announcements` and `taken` are streams. An announced version runs through the same two requests, PREPARE and COMMIT,
that a trainer could send to the engine. Of several announcements only the newest readable one counts; an engine that it
lists in `left_out` does nothing. The follower writes to `taken` when it starts, and after each version.

| waits for | unblocked by |
|---|---|
| an announcement | the trainer |
| the engine's two answers | the engine; the announcement's timeout |
"""

from __future__ import annotations

import json
import logging
from typing import Final

import msgspec
from pydantic import ValidationError

from inference_contract.engine import Engine
from inference_contract.errors import ContractError
from inference_contract.weights import UpdatePhase, UpdateStatus, WeightUpdateRequest
from pipelinerl import rng
from pipelinerl.messages import ANNOUNCEMENTS, TAKEN, WeightsTaken, decode_announcement, encode
from pipelinerl.streams.stream import Entry, Stream

log = logging.getLogger("pipelinerl")

_BLOCK_S: Final = 10.0


class AnnouncedUpdates:
    """Follower of the trainer's announcements for `engine`, whose base URL is `url`."""

    def __init__(self, engine: Engine, stream: Stream, *, url: str) -> None:
        self._engine = engine
        self._stream = stream
        self._url = url

    async def run(self) -> None:
        """Follow announcements until cancelled. Raises `AddressError` if the stream server cannot be reached."""
        offset = await self._stream.last_id(ANNOUNCEMENTS)
        await self._say(WeightsTaken(url=self._url))
        while True:
            entries = await self._stream.read({ANNOUNCEMENTS: offset}, count=64, block_s=_BLOCK_S)
            if entries:
                offset = entries[-1].entry_id
                if (prepare := self._newest(entries)) is not None:
                    await self._say(await self._taken(prepare))

    def _newest(self, entries: list[Entry]) -> WeightUpdateRequest | None:
        for entry in reversed(entries):
            try:
                announced = decode_announcement(entry.payload)
                prepare = WeightUpdateRequest.model_validate_json(announced.prepare)
            except (msgspec.DecodeError, ValidationError):
                log.error("skipping an unreadable announcement of weights: %s", entry.entry_id)
                continue
            return None if self._url in announced.left_out else prepare
        return None

    async def _taken(self, prepare: WeightUpdateRequest) -> WeightsTaken:
        commit = WeightUpdateRequest(
            phase=UpdatePhase.COMMIT,
            version=prepare.version,
            epoch=prepare.epoch,
            on_update=prepare.on_update,
            transport=prepare.transport,
            digest=prepare.digest,
            timeout_s=prepare.timeout_s,
        )
        try:
            answer = await self._engine.request_weight_update(self._turned(prepare))
            if answer.status is not UpdateStatus.ALREADY_SERVING:
                answer = await self._engine.request_weight_update(commit)
        except ContractError as error:
            status, answered, failed = error.status, b"", json.dumps(error.to_wire()).encode()
        else:
            status, answered, failed = 200, answer.model_dump_json().encode(), b""
        return WeightsTaken(
            url=self._url, epoch=prepare.epoch, version=prepare.version, answer=answered, error=failed, status=status
        )

    def _turned(self, prepare: WeightUpdateRequest) -> WeightUpdateRequest:
        """Return `prepare` with its parameter servers in an order that depends on the engine, to balance their load."""
        turn = rng.key(0, self._url)

        def turned(urls: tuple[str, ...]) -> tuple[str, ...]:
            at = turn % len(urls)
            return (*urls[at:], *urls[:at])

        if prepare.sources is not None:
            return prepare.model_copy(update={"sources": turned(prepare.sources)})
        if prepare.shards is not None:
            return prepare.model_copy(update={"shards": tuple(turned(urls) for urls in prepare.shards)})
        return prepare

    async def _say(self, taken: WeightsTaken) -> None:
        await self._stream.append(TAKEN, [encode(taken)])
