"""`DeadLetters`: where a record goes that could not be read, so that it is seen, counted, and in nobody's way.

The reader passes on; the entry is kept in the stream `dead-letters` with where it stood and why it was refused, as a
message of the kind `dead-letter` with the fields `stream`, `entry_id`, `reason`, `payload`. A reader that is restarted
may bury the same entry again: who counts letters over several lives counts distinct (`stream`, `entry_id`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from pipelinerl.errors import RecordError
from pipelinerl.streams.records import encode_message
from pipelinerl.streams.stream import Entry, Stream

DEAD_LETTERS: Final = "dead-letters"


@final
class DeadLetters:
    """Buries bad records; `counts` says how many of each stream in this process's life."""

    def __init__(self, streams: Stream) -> None:
        self.counts: Final[Counter[str]] = Counter()
        self._streams = streams

    async def bury(self, entry: Entry, error: RecordError) -> None:
        """Keep `entry`, which could not be read because of `error`. Its own stream keeps it until it is trimmed."""
        fields = {
            "stream": entry.stream,
            "entry_id": entry.entry_id,
            "reason": str(error),
            "payload": entry.payload,
        }
        await self._streams.append(DEAD_LETTERS, [encode_message("dead-letter", fields)])
        self.counts[entry.stream] += 1
