"""Announcement of versions by one stream entry, which all following engines read at once. Satisfies `Announcer`.

Two requests to each of a thousand engines would load the trainer's machine a thousandfold. The stream server answers a
thousand readers of one entry in a few milliseconds. `AnnouncedUpdates` is the other end. The announcer waits only for
engines that have said that they follow. If no engine answers for `quiet_s`, the silent ones are asked one by one, and
count as followers again once they answer.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| answers in `taken` | the engines that follow | the deadline, or `quiet_s` without any |
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Final, final

import msgspec
from pydantic import ValidationError

from inference_contract.errors import ContractError, from_wire
from inference_contract.weights import WeightUpdateRequest, WeightUpdateResponse
from pipelinerl.errors import PipelineError
from pipelinerl.messages import ANNOUNCEMENTS, TAKEN, WeightsAnnounced, WeightsTaken, decode_taken, encode_struct
from pipelinerl.streams.stream import START, Stream, fresh_number

log = logging.getLogger("pipelinerl")

#: The version that an engine serves now, or the reason why it does not serve the new one.
_Outcome = WeightUpdateResponse | ContractError | PipelineError

_MOST: Final = 4096
_BLOCK_S: Final = 1.0


@final
class StreamAnnouncer:
    """Announcer of one trainer. Used from one event loop, one announcement at a time."""

    def __init__(self, stream: Stream, *, quiet_s: float = 5.0) -> None:
        self._stream = stream
        self._quiet_s = quiet_s
        self._offset = START
        self._follow: set[str] = set()

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, _Outcome]:
        """Announce an update; see `Announcer`. Answers in `taken` to an earlier trainer are read too."""
        before = self._offset
        while await self._heard(block_s=0.0):
            pass
        awaited = self._follow.intersection(engines)
        if not awaited:
            return {}
        announced = WeightsAnnounced(prepare=prepare.model_dump_json(exclude_none=True).encode(), left_out=[*left_out])
        number = fresh_number(await self._stream.last_id(ANNOUNCEMENTS))
        await self._stream.append(ANNOUNCEMENTS, [encode_struct(announced)], first_id=number)
        answers: dict[str, _Outcome] = {}
        heard_at = time.monotonic()
        while awaited and (now := time.monotonic()) < (until := min(deadline, heard_at + self._quiet_s)):
            for taken in await self._heard(block_s=min(_BLOCK_S, until - now)):
                if taken.url in awaited and (taken.epoch, taken.version) == (prepare.epoch, prepare.version):
                    answers[taken.url] = _answer(taken)
                    awaited.discard(taken.url)
                    heard_at = time.monotonic()
        if awaited:
            log.warning("%d engines that follow announcements say nothing, and are asked", len(awaited))
            self._follow -= awaited
        await self._stream.trim(ANNOUNCEMENTS, before=f"{number}-0")
        await self._stream.trim(TAKEN, before=before)  # later trainers read it
        return answers

    async def _heard(self, *, block_s: float) -> list[WeightsTaken]:
        """Return what engines have said since the last call."""
        found = []
        for entry in await self._stream.read({TAKEN: self._offset}, count=_MOST, block_s=block_s):
            self._offset = entry.entry_id
            try:
                found.append(decode_taken(entry.payload))
            except msgspec.DecodeError:
                log.error("what an engine says of its weights cannot be read, and is passed over: %s", entry.entry_id)
        self._follow |= {taken.url for taken in found}
        return found


def _answer(taken: WeightsTaken) -> _Outcome:
    try:
        if not taken.error:
            return WeightUpdateResponse.model_validate_json(taken.answer)
        told: object = json.loads(taken.error)
    except (ValidationError, ValueError):
        told = None
    return from_wire(taken.status, told)
