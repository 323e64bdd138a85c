"""Every implementation of `Stream` (Redis and memory) keeps the promises of the interface."""

import asyncio
import time

import pytest

from pipelinerl.errors import AddressError, FencedError, RecordError
from pipelinerl.streams.records import decode_group, decode_message, encode_message
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import DEAD_LETTERS, START, DeadLetters, Fence, fresh_number, parse_id
from tests.patience import PATIENCE_S, SOON_S


def payloads(entries):
    return [entry.payload for entry in entries]


#: Seconds after which a claimed entry counts as idle; long enough that no fresh entry does on a busy machine.
IDLE_S = 2.0


async def claim(streams, consumer, *, count=10, idle_s=60.0):
    return await streams.claim(
        "prompts", group="actors", consumer=consumer, count=count, block_s=0.0, reclaim_idle_s=idle_s
    )


async def test_entries_are_read_in_order_and_unchanged(streams):
    sent = [bytes(range(256)), b"", b"\r\n$3\r\n", b"x" * 100_000]
    assert await streams.append("s", sent) == 4
    entries = await streams.read({"s": START}, count=10, block_s=0)
    assert payloads(entries) == sent
    assert {entry.stream for entry in entries} == {"s"}
    ids = [parse_id(entry.entry_id) for entry in entries]
    assert ids == sorted(set(ids))


async def test_read_returns_entries_after_each_streams_offset_up_to_a_limit_per_stream(streams):
    await streams.append("a", [b"a1", b"a2", b"a3"], first_id=1)
    await streams.append("b", [b"b1", b"b2", b"b3"], first_id=1)
    entries = await streams.read({"a": "1-0", "b": START}, count=2, block_s=0)
    assert sorted((entry.stream, entry.entry_id, entry.payload) for entry in entries) == [
        ("a", "2-0", b"a2"),
        ("a", "3-0", b"a3"),
        ("b", "1-0", b"b1"),
        ("b", "2-0", b"b2"),
    ]
    assert await streams.read({"a": "3-0"}, count=2, block_s=0) == []
    assert await streams.read({}, count=2, block_s=10) == []


async def test_append_with_ids_chosen_by_the_producer_skips_entries_that_the_stream_already_has(streams):
    assert await streams.append("s", [b"1", b"2"], first_id=1) == 2
    assert await streams.append("s", [b"1", b"2"], first_id=1) == 0
    assert await streams.append("s", [b"other 2", b"3", b"4"], first_id=2) == 2
    assert payloads(await streams.read({"s": START}, count=10, block_s=0)) == [b"1", b"2", b"3", b"4"]
    assert await streams.last_id("s") == "4-0"


@pytest.mark.parametrize("first_id", [0, -3])
async def test_append_with_an_invalid_first_id_is_rejected(streams, first_id):
    with pytest.raises(ValueError, match="first_id"):
        await streams.append("s", [b"1"], first_id=first_id)
    assert await streams.length("s") == 0


async def test_fresh_entry_ids_are_distinct_and_above_all_ids_in_the_stream(streams):
    await streams.append("s", [b"by the server"])
    first = fresh_number(await streams.last_id("s"))
    assert await streams.append("s", [b"by the producer"] * 3, first_id=first) == 3
    entries = await streams.read({"s": START}, count=9, block_s=0)
    assert [entry.entry_id for entry in entries[1:]] == [f"{first + number}-0" for number in range(3)]
    assert fresh_number(f"{1 << 52}-7") == (1 << 52) + 1


async def test_stream_that_was_never_written_is_empty(streams):
    assert await streams.last_id("none") == START
    assert await streams.length("none") == 0
    assert await streams.read({"none": START}, count=1, block_s=0) == []
    assert await streams.append("none", []) == 0
    await streams.trim("none", before="5-0")
    await streams.acknowledge("none", group="g", entry_ids=["1-0"])
    assert await streams.streams("") == []


@pytest.mark.parametrize("offset", ["", "7", "x-0", "1-", "-1", "1-0-0", "$"])
async def test_malformed_stream_offset_is_rejected(streams, offset):
    with pytest.raises(ValueError, match="entry id"):
        await streams.read({"s": offset}, count=1, block_s=0)


async def test_each_entry_is_claimed_by_only_one_consumer_of_each_group(streams):
    await streams.append("prompts", [b"%d" % number for number in range(7)])
    shares = [await claim(streams, consumer, count=3) for consumer in ("a", "b", "a", "b")]
    assert [len(share) for share in shares] == [3, 3, 1, 0]
    others = await streams.claim("prompts", group="watchers", consumer="a", count=9, block_s=0, reclaim_idle_s=60)
    assert payloads(entry for share in shares for entry in share) == payloads(others) == [b"%d" % n for n in range(7)]


async def test_entries_claimed_by_a_dead_consumer_are_claimed_again_before_new_entries(streams):
    await streams.append("prompts", [b"1", b"2", b"3"])
    held = await claim(streams, "dead", count=2)
    await streams.acknowledge("prompts", group="actors", entry_ids=[held[0].entry_id])
    await asyncio.sleep(0.06)
    assert payloads(await claim(streams, "alive", idle_s=0.05)) == [b"2"]
    assert payloads(await claim(streams, "alive", idle_s=PATIENCE_S)) == [b"3"]


async def test_entries_that_are_acknowledged_or_recently_claimed_are_not_claimed_again(streams):
    await streams.append("prompts", [b"1", b"2"])
    first, second = await claim(streams, "a", idle_s=0.0)
    assert await claim(streams, "b", idle_s=30.0) == []
    await streams.acknowledge("prompts", group="actors", entry_ids=[first.entry_id, second.entry_id])
    assert await claim(streams, "b", idle_s=0.0) == []


async def test_idle_entry_is_claimed_even_if_many_claimed_entries_precede_it(streams):
    """Redis' XAUTOCLAIM scans at most ten times `count` entries per call and returns a cursor to continue from."""
    await streams.append("prompts", [b"%d" % number for number in range(60)])
    lost = await claim(streams, "dead", count=60)
    await asyncio.sleep(IDLE_S)
    kept = [entry.entry_id for entry in await claim(streams, "alive", count=59, idle_s=IDLE_S)]
    assert kept == [entry.entry_id for entry in lost[:59]]
    assert payloads(await claim(streams, "other", count=1, idle_s=IDLE_S)) == [b"59"]


async def test_waiting_consumer_claims_another_consumers_entry_as_soon_as_it_counts_as_idle(streams):
    await streams.append("prompts", [b"1"])
    await claim(streams, "dead")
    started = time.monotonic()
    entries = await streams.claim(
        "prompts", group="actors", consumer="alive", count=1, block_s=PATIENCE_S, reclaim_idle_s=0.1
    )
    assert payloads(entries) == [b"1"]
    assert time.monotonic() - started < SOON_S


async def test_restarted_consumer_gets_the_entries_that_it_claimed_and_did_not_acknowledge(streams):
    assert await streams.held("prompts", group="actors", consumer="a") == []
    await streams.append("prompts", [b"1", b"2", b"3", b"4"], first_id=1)
    assert payloads(await claim(streams, "a", count=3)) == [b"1", b"2", b"3"]
    assert payloads(await claim(streams, "b")) == [b"4"]
    await streams.acknowledge("prompts", group="actors", entry_ids=["2-0"])
    await streams.trim("prompts", before="2-0")
    assert payloads(await streams.held("prompts", group="actors", consumer="a")) == [b"3"]
    assert payloads(await streams.held("prompts", group="actors", consumer="a")) == [b"3"], (
        "listing them does not change the claims"
    )


async def test_each_delivery_of_an_entry_is_counted_and_a_consumer_may_correct_the_count(streams):
    async def held(consumer):
        entries = await streams.held("prompts", group="actors", consumer=consumer)
        return [(entry.entry_id, entry.deliveries) for entry in entries]

    await streams.append("prompts", [b"1", b"2", b"3"], first_id=1)
    assert [entry.deliveries for entry in await claim(streams, "a")] == [1, 1, 1]
    assert await held("a") == [("1-0", 2), ("2-0", 2), ("3-0", 2)]
    await streams.renew("prompts", group="actors", consumer="a", entry_ids=["1-0", "3-0"])
    await streams.renew("prompts", group="actors", consumer="a", entry_ids=["2-0"], deliveries=0)
    assert await held("a") == [("1-0", 3), ("2-0", 1), ("3-0", 3)]
    await streams.acknowledge("prompts", group="actors", entry_ids=["3-0"])
    assert [(entry.entry_id, entry.deliveries) for entry in await claim(streams, "b", idle_s=0.0)] == [
        ("1-0", 4),
        ("2-0", 2),
    ]
    assert await held("a") == []


async def test_entry_whose_claim_was_renewed_is_not_claimed_by_another_consumer(streams):
    await streams.append("prompts", [b"1", b"2"], first_id=1)
    await claim(streams, "a")
    await asyncio.sleep(IDLE_S)
    await streams.renew("prompts", group="actors", consumer="a", entry_ids=["2-0", "9-0"])
    await streams.renew("prompts", group="actors", consumer="a", entry_ids=[])
    assert payloads(await claim(streams, "b", idle_s=IDLE_S)) == [b"1"]


async def test_claimed_entry_that_was_trimmed_from_the_stream_is_not_claimed_again(streams):
    await streams.append("prompts", [b"1", b"2"], first_id=1)
    await claim(streams, "dead")
    await streams.trim("prompts", before="2-0")
    assert payloads(await claim(streams, "alive", idle_s=0.0)) == [b"2"]


async def test_trim_by_a_writer_is_rejected_once_a_newer_writer_has_taken_over(streams):
    await streams.append("s", [b"1", b"2", b"3"], first_id=1)
    await streams.trim("s", before="2-0", fence=Fence("epochs", 1))
    await streams.append("epochs", [b""], first_id=1)
    await streams.trim("s", before="3-0", fence=Fence("epochs", 1))
    await streams.append("epochs", [b""], first_id=2)
    with pytest.raises(FencedError, match="a newer writer than 1 has taken over epochs"):
        await streams.trim("s", before="4-0", fence=Fence("epochs", 1))
    assert payloads(await streams.read({"s": START}, count=9, block_s=0)) == [b"3"]


async def test_trim_removes_only_entries_before_the_given_id(streams):
    await streams.append("s", [b"%d" % number for number in range(1, 6)], first_id=1)
    await streams.trim("s", before="3-0")
    assert payloads(await streams.read({"s": START}, count=9, block_s=0)) == [b"3", b"4", b"5"]
    await streams.trim("s", before="99-0")
    assert await streams.length("s") == 0
    assert await streams.last_id("s") == "5-0"
    assert await streams.append("s", [b"again"], first_id=5) == 0


async def test_stream_over_its_capacity_reports_room_for_0_entries_but_drops_none(streams):
    assert await streams.room("s") == 10
    await streams.append("s", [b"x"] * 9)
    assert await streams.room("s") == 1
    await streams.append("s", [b"x"] * 9)
    assert await streams.room("s") == 0
    assert await streams.length("s") == 18


async def test_streams_are_listed_by_a_prefix_in_which_wildcards_have_no_special_meaning(streams):
    for name in ("rollouts:a1", "rollouts:a0", "reports", "roll*", "rollouts:[x]"):
        await streams.append(name, [b"1"])
    assert await streams.streams("rollouts:") == ["rollouts:[x]", "rollouts:a0", "rollouts:a1"]
    assert await streams.streams("roll*") == ["roll*"]
    assert await streams.streams("rollouts:[") == ["rollouts:[x]"]


async def test_reads_and_claims_wait_for_an_append_but_no_longer_than_block_s(streams):
    async def wait_for_entries(block_s):
        reader = streams.read({"other": START, "prompts": START}, count=9, block_s=block_s)
        claimer = streams.claim("prompts", group="g", consumer="a", count=1, block_s=block_s, reclaim_idle_s=60)
        return [payloads(entries) for entries in await asyncio.gather(reader, claimer)]

    started = time.monotonic()
    assert await wait_for_entries(0.15) == [[], []]
    assert 0.15 <= time.monotonic() - started < SOON_S
    waiting = asyncio.create_task(wait_for_entries(PATIENCE_S))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await streams.append("prompts", [b"1"])
    assert await waiting == [[b"1"], [b"1"]]
    assert time.monotonic() - started < SOON_S


async def test_entries_of_concurrent_producers_stay_in_the_order_of_each_producer(streams):
    """All entries of each producer arrive in order, on a stream shared by the producers and on a stream of its own."""

    async def produce(name):
        for batch in range(10):
            numbers = range(5 * batch, 5 * batch + 5)
            await streams.append("shared", [b"%d:%03d" % (name, number) for number in numbers])
            own = [b"%03d" % number for number in numbers]
            for _ in range(2):  # append twice, as a producer does if the response to its first append was lost
                await streams.append(f"own:{name}", own, first_id=1 + 5 * batch)

    await asyncio.gather(*(produce(name) for name in range(8)))
    shared = payloads(await streams.read({"shared": START}, count=1000, block_s=0))
    assert len(shared) == 400
    for name in range(8):
        expected = [b"%03d" % number for number in range(50)]
        assert [entry[2:] for entry in shared if entry.startswith(b"%d:" % name)] == expected
        assert payloads(await streams.read({f"own:{name}": START}, count=1000, block_s=0)) == expected


async def test_error_for_an_unknown_url_scheme_of_the_stream_server_omits_the_urls_password():
    with pytest.raises(AddressError, match="memory:// or redis://") as raised:
        await open_stream("amqp://user:secret@host", namespace="n")
    assert "secret" not in str(raised.value)


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
