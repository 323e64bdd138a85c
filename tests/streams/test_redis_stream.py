"""Streams on a real Redis server that is killed, restarted, hangs, is full or rejects a command."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from pipelinerl.errors import AddressError, PipelineError
from pipelinerl.rng import generator
from pipelinerl.streams import redis_stream
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.redis_stream import RedisStream, open_stream
from pipelinerl.streams.stream import START, Fence
from pipelinerl.system.machine import free_ports
from tests.fakes import small_disk
from tests.patience import PATIENCE_S, SOON_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mortal(tmp_path):
    """Yield a Redis server that the test may kill; it acknowledges each write only after syncing it to disk."""
    with EmbeddedRedis(tmp_path / "server", syncs_always=True) as running:
        yield running


@asynccontextmanager
async def connected(server, namespace="run", timeout_s=PATIENCE_S, outage_s=PATIENCE_S):
    streams = RedisStream(server.url, namespace=namespace, timeout_s=timeout_s, outage_s=outage_s)
    try:
        yield await streams.connect()
    finally:
        await streams.close()


async def kill_and_restart(server):
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.sleep(0.05)  # time for the producers to notice that the connection is closed
    # Wait for the server's death, which takes longer on a busy machine: `start` keeps a server that is still alive.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    server.start()


async def test_redis_server_killed_during_appends_neither_loses_nor_duplicates_an_entry(mortal):
    async with connected(mortal) as streams:
        answered = {"a": 0, "b": 0, "c": 0}
        done = asyncio.Event()

        async def produce(name):
            while not done.is_set():
                numbers = range(answered[name] + 1, answered[name] + 8)
                await streams.append(name, [b"%d" % number for number in numbers], first_id=numbers[0])
                answered[name] = numbers[-1]

        async with asyncio.TaskGroup() as producers:
            for name in answered:
                producers.create_task(produce(name))
            for pause in generator(0, "kill pauses").uniform(0.0, 0.05, size=5):
                before = dict(answered)
                while any(answered[name] == number for name, number in before.items()):
                    await asyncio.sleep(0.005)
                await asyncio.sleep(pause)
                before = dict(answered)
                await kill_and_restart(mortal)
                for name, number in before.items():
                    assert int((await streams.last_id(name)).partition("-")[0]) >= number
            done.set()
        for name, number in answered.items():
            entries = await streams.read({name: START}, count=1_000_000, block_s=0)
            assert [int(entry.payload) for entry in entries] == list(range(1, number + 1))


async def test_waiting_reads_continue_and_claims_are_kept_after_a_redis_restart(mortal):
    async with connected(mortal) as streams:
        await streams.append("s", [b"1"], first_id=1)
        reader = asyncio.create_task(streams.read({"s": "1-0"}, count=1, block_s=PATIENCE_S))
        options = {"group": "g", "count": 9, "block_s": PATIENCE_S}
        assert len(await streams.claim("s", consumer="c", reclaim_idle_s=60, **options)) == 1
        claimer = asyncio.create_task(streams.claim("s", consumer="c", reclaim_idle_s=60, **options))
        await asyncio.sleep(0.05)
        await kill_and_restart(mortal)
        await streams.append("s", [b"2"], first_id=2)
        assert [entry.payload for entry in await reader + await claimer] == [b"2", b"2"]
        kept = await streams.claim("s", consumer="other", reclaim_idle_s=0, **options)
        assert [entry.payload for entry in kept] == [b"1", b"2"]


async def test_stream_server_that_crashes_loses_only_the_newest_entries_of_its_history(tmp_path):
    """The append-only file is cut off after each entry in turn, as by a crash; lost groups are made again."""
    server = EmbeddedRedis(tmp_path).start()
    streams = await open_stream(server.url, namespace="run", timeout_s=PATIENCE_S)
    await streams.append("prompts", [b"%d" % number for number in range(4)])
    for number in range(1, 4):
        held = await streams.claim("prompts", group="actors", consumer="a0", count=1, block_s=0, reclaim_idle_s=60)
        await streams.append("rollouts", [held[0].payload], first_id=number)
        await streams.acknowledge("prompts", group="actors", entry_ids=[held[0].entry_id])
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    server.stop()
    whole = log.read_bytes()
    kept = set()
    for cut in range(len(whole) - 10, len(whole) * 2 // 3, -41):
        log.write_bytes(whole[:cut])
        server.start()
        appended = [entry.payload for entry in await streams.read({"rollouts": START}, count=9, block_s=0)]
        left = await streams.claim("prompts", group="actors", consumer="a1", count=9, block_s=0, reclaim_idle_s=0)
        left += await streams.claim("prompts", group="actors", consumer="a1", count=9, block_s=0, reclaim_idle_s=60)
        assert {*appended, *(entry.payload for entry in left)} == {b"%d" % number for number in range(4)}
        kept.add(len(appended))
        server.stop()
    assert kept >= {1, 2, 3}
    await streams.close()


async def test_redis_restart_does_not_make_a_read_wait_longer_than_its_timeout(mortal, monkeypatch):
    """While the server is down, the test moves the clock past the read's timeout; the read must not wait again."""
    ahead_s = 0.0
    monkeypatch.setattr(redis_stream, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    async with connected(mortal) as streams:
        reader = asyncio.create_task(streams.read({"s": START}, count=1, block_s=PATIENCE_S))
        await asyncio.sleep(0.2)
        assert not reader.done()
        ahead_s = PATIENCE_S
        await kill_and_restart(mortal)
        assert await asyncio.wait_for(reader, SOON_S) == []


async def test_error_for_an_unreachable_stream_server_gives_its_url_without_the_password(mortal):
    async with connected(mortal, outage_s=1.0) as streams:
        mortal.stop()
        started = time.monotonic()
        with pytest.raises(AddressError, match=r"cannot reach the stream server at redis://127\.0\.0\.1:\d+ for 1 s"):
            await streams.append("s", [b"1"])
        assert 0.9 < time.monotonic() - started < SOON_S


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:secret@{host}", "rejected the user or password"),
        ("redis://{host}", "rejected the user or password"),
        ("redis://user:secret@127.0.0.1:{closed}", r"cannot reach the stream server at redis://127\.0\.0\.1:"),
        ("redis://host:port", "must be redis://host:port"),
        ("redis://host:6379/0?socket_timeout=x", "must be redis://host:port"),
    ],
)
async def test_connecting_with_a_wrong_url_fails_without_revealing_the_password(server, url, reason):
    url = url.format(host=server.url.rpartition("@")[2], closed=free_ports(1)[0])
    with pytest.raises(AddressError, match=reason) as raised:
        await RedisStream(url, namespace="n", timeout_s=0.2 if "@127" in url else PATIENCE_S).connect()
    assert "secret" not in str(raised.value)


async def test_append_to_a_hanging_redis_server_fails_at_its_deadline_and_later_appends_work(mortal):
    async with connected(mortal, timeout_s=3.0, outage_s=3.0) as streams:
        await streams.append("s", [b"1"], first_id=1)
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            with pytest.raises(AddressError, match=r"did not answer for 0\.5 s; check if it is stopped"):
                await RedisStream(mortal.url, namespace="n", timeout_s=0.5).connect()
            with pytest.raises(AddressError, match=r"did not answer for 3 s"):
                await streams.append("s", [b"2"], first_id=2)
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        await streams.append("s", [b"2", b"3"], first_id=2)
        # The hanging server answers the abandoned append late; a later command must not take this answer for its own.
        assert await streams.length("s") == 3
        assert await streams.last_id("s") == "3-0"


async def test_append_to_a_hanging_redis_server_is_repeated_until_the_server_answers(mortal, caplog):
    async with connected(mortal, timeout_s=0.5) as streams:
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            append = asyncio.create_task(streams.append("s", [b"1", b"2"], first_id=1))
            async with asyncio.timeout(PATIENCE_S):
                while not streams.outage:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
            assert streams.outage == "does not answer" and not append.done()
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        await append
        assert await streams.length("s") == 2, "the server also runs the calls that it received while it hung"
        assert streams.outage == ""
    assert [record.getMessage().partition(" at ")[0] for record in caplog.records] == ["the stream server"] * 2


async def test_entries_after_a_rejected_entry_are_not_appended_so_that_a_retry_leaves_no_gap(mortal):
    """After a rejected payload, no later one may be appended: a retry of the rejected one would be skipped as already
    present, because its id would be lower than the stream's last.
    """
    async with connected(mortal, outage_s=0.2) as streams:
        admin = Redis.from_url(mortal.url, protocol=2)
        large = os.urandom(1 << 16)
        await streams.append("s", [b"1"], first_id=1)
        await admin.acl_setuser("default", enabled=True, reset_keys=True, keys=["run:s"], reset=False)
        with pytest.raises(PipelineError, match=r"answer of the stream server at redis://127\.0\.0\.1"):
            await streams.append("forbidden", [large])
        await admin.config_set("maxmemory", int((await admin.info("memory"))["used_memory"]) + (1 << 20))
        with pytest.raises(PipelineError, match=r"(?i)memory"):
            for number in range(2, 200):
                await streams.append("s", [large] * 8, first_id=8 * number)
        await admin.config_set("maxmemory", 0)
        kept = [
            int(entry.entry_id.partition("-")[0]) for entry in await streams.read({"s": "1-0"}, count=9999, block_s=0)
        ]
        assert kept
        assert kept == list(range(16, kept[-1] + 1))
        await admin.aclose()


async def test_append_to_a_redis_server_without_free_memory_waits_until_memory_is_free(mortal, caplog):
    async with connected(mortal) as streams:
        admin = Redis.from_url(mortal.url, protocol=2)
        await admin.config_set("maxmemory", 1)
        with caplog.at_level(logging.WARNING, logger="pipelinerl"):
            appends = [asyncio.create_task(streams.append(name, [b"1", b"2"], first_id=1)) for name in "ab"]
            async with asyncio.timeout(PATIENCE_S):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            assert not any(append.done() for append in appends)
            await admin.config_set("maxmemory", 0)
            assert await asyncio.gather(*appends) == [2, 2]
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2 and "is full" in messages[0] and "works again" in messages[1], (
            "each state is logged once, not for each retry"
        )
        await admin.aclose()


async def _on_a_small_disk(place):
    with EmbeddedRedis(place / "redis") as server:
        async with connected(server) as streams, connected(server, outage_s=0.5) as impatient:
            await streams.append("s", [b"1"], first_id=1)
            small_disk.fill(place)
            refused = ""
            for number in range(2, 99):  # several appends, since the file's last page has some space left
                try:
                    await impatient.append("s", [bytes(20_000)], first_id=number)
                except PipelineError as error:
                    refused = str(error)
                    break
                await asyncio.sleep(0.05)
            assert refused.startswith("MISCONF"), refused
            claimed = streams.claim("s", group="g", consumer="c", count=1, block_s=0, reclaim_idle_s=60)
            waiting = asyncio.gather(streams.append("s", [b"2"], first_id=1000), claimed)
            await asyncio.sleep(1.0)
            assert not waiting.done()
            small_disk.free(place)
            added, (first,) = await waiting
            assert (added, first.payload) == (1, b"1")
            assert await streams.last_id("s") == "1000-0"


def test_append_waits_for_disk_space(tmp_path):
    if reason := small_disk.why_not(tmp_path / "disk"):
        pytest.skip(f"no disk of a size of one's own: {reason}")
    code = (
        "import asyncio, pathlib, sys\nfrom tests.streams.test_redis_stream import _on_a_small_disk\n"
        "asyncio.run(_on_a_small_disk(pathlib.Path(sys.argv[1])))"
    )
    words = [*small_disk.command(tmp_path / "disk", size="1m"), sys.executable, "-c", code, str(tmp_path / "disk")]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr


async def test_append_larger_than_one_call_of_the_redis_script_allows_is_split_into_several_calls(server):
    async with connected(server, "large") as streams:
        payloads = [bytes([number]) * (1 << 20) for number in range(10)]
        assert await streams.append("s", payloads, first_id=5) == 10
        assert await streams.append("s", payloads, first_id=5) == 0
        entries = await streams.read({"s": START}, count=99, block_s=0)
        assert [(entry.entry_id, entry.payload) for entry in entries] == [
            (f"{5 + number}-0", payload) for number, payload in enumerate(payloads)
        ]
        with pytest.raises(ValueError, match="first_id"):
            await streams.append("s", [b"x"], first_id=1 << 53)


async def test_streams_of_one_namespace_are_not_visible_in_another(server):
    async with connected(server, "one") as one, connected(server, "two") as two:
        await one.append("s", [b"1"])
        assert await two.length("s") == 0
        assert await two.streams("") == []
        assert await one.streams("") == ["s"]


async def test_commands_wait_while_the_redis_server_is_a_replica(mortal, caplog):
    """A failover makes the server a replica for a while: it rejects writes and ends blocking commands."""
    async with connected(mortal) as streams, connected(mortal) as reading:
        admin = Redis.from_url(mortal.url, protocol=2)
        await streams.append("s", [b"1"], first_id=1)
        read = asyncio.create_task(reading.read({"s": "1-0"}, count=1, block_s=PATIENCE_S))
        options = {"group": "g", "consumer": "c", "count": 9, "block_s": PATIENCE_S, "reclaim_idle_s": 60.0}
        assert len(await streams.claim("s", **options)) == 1
        claim = asyncio.create_task(reading.claim("s", **options))
        await asyncio.sleep(0.1)
        await admin.execute_command("REPLICAOF", "127.0.0.1", free_ports(1)[0])
        with caplog.at_level(logging.WARNING, logger="pipelinerl"):
            writes = [
                asyncio.create_task(streams.append("s", [b"2", b"3"], first_id=2)),
                asyncio.create_task(streams.trim("t", before="1-0", fence=Fence(stream="f", number=1))),
            ]
            async with asyncio.timeout(PATIENCE_S):
                while "READONLY" not in streams.outage:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert not writes[0].done() and not claim.done()
            await admin.execute_command("REPLICAOF", "NO", "ONE")
            await asyncio.gather(*writes)
        assert [entry.payload for entry in await read] == [b"2"]
        assert [entry.payload for entry in await claim] == [b"2", b"3"]
        assert streams.outage == "" and await streams.length("s") == 3
        assert "rejects commands in its state READONLY" in caplog.text
        await admin.aclose()


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        ("LOADING Redis is loading the dataset in memory", 8),  # for longer than `timeout_s`
        ("READONLY You can't write against a read only replica.", 1),
        ("MASTERDOWN Link with MASTER is down", 1),
        ("CLUSTERDOWN Hash slot not served", 1),
        ("TRYAGAIN Multiple keys request", 1),
        ("NOREPLICAS Not enough good replicas to write.", 1),
        ("UNBLOCKED force unblock from blocking operation", 1),
        ("BUSY Redis is busy running a script", 1),
        ("ERR Error running script: @user_script:4: -READONLY You can't write against a read only replica.", 1),
    ],
)
async def test_error_that_the_state_of_a_redis_server_causes_is_waited_for_when_connecting(answer, times):
    left = times

    async def serve(reader, writer):
        """Answer the first PINGs by the error, then as a server does."""
        nonlocal left
        while line := await reader.readline():
            name, *_ = [await _bulk(reader) for _ in range(int(line[1:]))]
            right = {b"PING": b"+PONG\r\n", b"INFO": b"$0\r\n\r\n"}.get(name, b"+OK\r\n")
            fails = name == b"PING" and left > 0
            left -= fails
            writer.write(f"-{answer}\r\n".encode() if fails else right)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        timeout_s = 0.5 if times > 1 else PATIENCE_S
        streams = await RedisStream(url, namespace="n", timeout_s=timeout_s, outage_s=PATIENCE_S).connect()
        assert left == 0 and streams.outage == ""
        await streams.close()


async def _bulk(reader):
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [("allkeys-lru", True), ("allkeys-random", True), ("volatile-lru", False), ("noeviction", False)],
)
async def test_redis_server_that_evicts_entries_is_refused_when_connecting(policy, is_refused, server):
    admin = Redis.from_url(server.url, protocol=2)
    await admin.config_set("maxmemory-policy", policy)
    try:
        streams = RedisStream(server.url, namespace="n", timeout_s=PATIENCE_S)
        if is_refused:
            with pytest.raises(
                AddressError, match=f"has the maxmemory-policy {policy}, which deletes .* to noeviction$"
            ):
                await streams.connect()
        else:
            await (await streams.connect()).close()
    finally:
        await admin.config_set("maxmemory-policy", "noeviction")
        await admin.aclose()
