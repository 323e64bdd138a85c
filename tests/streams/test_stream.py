"""Unreadable stream entries are moved to the dead-letter stream with a reason, and counted."""

import pytest

from pipelinerl.errors import RecordError
from pipelinerl.streams.records import decode_group, decode_message, encode_message
from pipelinerl.streams.stream import DEAD_LETTERS, START, DeadLetters


async def test_unreadable_record_is_moved_to_the_dead_letter_stream(streams):
    damaged = bytearray(encode_message("report", {"step": 1}))
    damaged[20] ^= 1
    await streams.append("rollouts:a0", [bytes(damaged), b"not a record"], first_id=7)
    letters = DeadLetters(streams)
    for entry in await streams.read({"rollouts:a0": START}, count=9, block_s=0):
        with pytest.raises(RecordError) as raised:
            decode_group(entry.payload)
        await letters.bury(entry, raised.value)
    assert letters.counts == {"rollouts:a0": 2}
    kept = [decode_message(entry.payload) for entry in await streams.read({DEAD_LETTERS: START}, count=9, block_s=0)]
    assert [message.kind for message in kept] == ["dead-letter"] * 2
    assert kept[0].body == {
        "stream": "rollouts:a0",
        "entry_id": "7-0",
        "reason": "the digest of a record does not match its content: it is damaged",
        "payload": bytes(damaged),
    }
    assert kept[1].body["payload"] == b"not a record"
