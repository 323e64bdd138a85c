"""`RolloutWriter`: appends one actor's groups under numbers of its own choice, so that a repeated append is a no-op.

Promises: what `append` has returned for lies in the partition, once. It fences, too: of two actors of one name, the one
that numbers from the earlier clock finds its numbers passed. It must not take its groups for appended, and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, final

from pipelinerl.errors import FencedError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import Stream, fresh_number
from pipelinerl.types import RolloutGroup


@final
class RolloutWriter:
    """The writer; one at a time. `number` is that of its next group."""

    def __init__(self, stream: Stream, *, actor: str, number: int) -> None:
        self._stream = stream
        self._actor = actor
        self._name = ROLLOUTS + actor
        self.number = number

    @classmethod
    async def begin(cls, stream: Stream, *, actor: str) -> Self:
        """Write on after whatever an earlier life of the actor has written."""
        return cls(stream, actor=actor, number=fresh_number(await stream.last_id(ROLLOUTS + actor)))

    async def append(self, groups: Sequence[RolloutGroup]) -> None:
        """Append in order.

        Raises:
            FencedError: another actor of this name writes here.
        """
        payloads = [encode_group(group) for group in groups]
        first, self.number = self.number, self.number + len(groups)
        if await self._stream.append(self._name, payloads, first_id=first) < len(payloads):
            await self._check(first, payloads)

    async def _check(self, first: int, payloads: Sequence[bytes]) -> None:
        """Some lay there already: by us, when the answer to a first try was lost, or in place of ours."""
        ours = {f"{first + place}-0": payload for place, payload in enumerate(payloads)}
        last = await self._stream.last_id(self._name)
        found = await self._stream.read({self._name: f"{first - 1}-0"}, count=len(ours), block_s=0)
        # Of ours, what the trainer has finished with may be gone. The last id stays.
        if last != f"{self.number - 1}-0" or any(ours.get(entry.entry_id) != entry.payload for entry in found):
            raise FencedError(f"another actor is called {self._actor}; give each a --name of its own; this one stops")
