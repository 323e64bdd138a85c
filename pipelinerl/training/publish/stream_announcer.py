"""`StreamAnnouncer`: announces versions by one entry of a stream, which all engines that follow it read at once.

A thousand requests, two to each engine, cost the trainer's machine as much as they cost; the stream server answers a
thousand readers who wait for one entry in a few milliseconds. Satisfies `Announcer`; `AnnouncedUpdates` is the other
end. Promises: nobody is waited for who has not said that it follows; who says nothing while nobody else does for
`quiet_s` either is left to be asked one by one, and counts as a follower again when it says something.

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

#: What an engine serves now, or why it does not.
_Outcome = WeightUpdateResponse | ContractError | PipelineError

_MOST: Final = 4096
_BLOCK_S: Final = 1.0


@final
class StreamAnnouncer:
    """One trainer's; used from one event loop, one announcement at a time."""

    def __init__(self, stream: Stream, *, quiet_s: float = 5.0) -> None:
        self._stream = stream
        self._quiet_s = quiet_s
        self._offset = START
        self._follow: set[str] = set()

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, _Outcome]:
        """See `Announcer`; what a trainer before this one was told in `taken` is heard, too."""
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
        await self._stream.trim(TAKEN, before=before)  # a trainer that comes next learns from the last who follows
        return answers

    async def _heard(self, *, block_s: float) -> list[WeightsTaken]:
        """What engines have said since the last time."""
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
