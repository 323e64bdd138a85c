"""`follow_announcements`: follows a trainer's announcements of new weights, pulls each version, reports the result.

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


async def follow_announcements(engine: Engine, stream: Stream, *, url: str) -> None:
    """Follow announcements for `engine` at `url` until cancelled. Raises `AddressError` without the stream server."""
    offset = await stream.last_id(ANNOUNCEMENTS)
    taken = WeightsTaken(url=url)
    while True:
        await stream.append(TAKEN, [encode(taken)])
        prepare = None
        while prepare is None:
            entries = await stream.read({ANNOUNCEMENTS: offset}, count=64, block_s=_BLOCK_S)
            if entries:
                offset = entries[-1].entry_id
                prepare = _newest(entries, url)
        taken = await _taken(engine, prepare, url)


def _newest(entries: list[Entry], url: str) -> WeightUpdateRequest | None:
    for entry in reversed(entries):
        try:
            announced = decode_announcement(entry.payload)
            prepare = WeightUpdateRequest.model_validate_json(announced.prepare)
        except (msgspec.DecodeError, ValidationError):
            log.error("skipping an unreadable announcement of weights: %s", entry.entry_id)
            continue
        return None if url in announced.left_out else prepare
    return None


async def _taken(engine: Engine, prepare: WeightUpdateRequest, url: str) -> WeightsTaken:
    commit = WeightUpdateRequest(
        phase=UpdatePhase.COMMIT,
        version=prepare.version,
        epoch=prepare.epoch,
        on_update=prepare.on_update,
        transport=prepare.transport,
        digest=prepare.digest,
        timeout_s=prepare.timeout_s,
    )
    # Each engine turns the lists of parameter servers by its own number, to balance their load.
    turn = rng.key(0, url)
    listed = {
        "sources": prepare.sources and _turned(prepare.sources, turn),
        "shards": prepare.shards and tuple(_turned(urls, turn) for urls in prepare.shards),
    }
    try:
        answer = await engine.request_weight_update(prepare.model_copy(update=listed))
        if answer.status is not UpdateStatus.ALREADY_SERVING:
            answer = await engine.request_weight_update(commit)
    except ContractError as error:
        status, answered, failed = error.status, b"", json.dumps(error.to_wire()).encode()
    else:
        status, answered, failed = 200, answer.model_dump_json().encode(), b""
    return WeightsTaken(
        url=url, epoch=prepare.epoch, version=prepare.version, answer=answered, error=failed, status=status
    )


def _turned(urls: tuple[str, ...], turn: int) -> tuple[str, ...]:
    at = turn % len(urls)
    return (*urls[at:], *urls[:at])
