"""`DeadLetters`, the store for records that cannot be decoded.

The reader skips such a record. The entry is copied to the stream `dead-letters` as a message of the kind `dead-letter`
with the fields `stream`, `entry_id`, `reason`, `payload`. A restarted reader may store the same entry again, so count
distinct (`stream`, `entry_id`) across restarts.
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
    """Stores unreadable records; `counts` holds the number per stream since this process started."""

    def __init__(self, streams: Stream) -> None:
        self.counts: Final[Counter[str]] = Counter()
        self._streams = streams

    async def bury(self, entry: Entry, error: RecordError) -> None:
        """Store `entry`, which failed to decode with `error`. Its own stream keeps it until it is trimmed."""
        fields = {
            "stream": entry.stream,
            "entry_id": entry.entry_id,
            "reason": str(error),
            "payload": entry.payload,
        }
        await self._streams.append(DEAD_LETTERS, [encode_message("dead-letter", fields)])
        self.counts[entry.stream] += 1
