"""Parameter servers in separate processes are killed in the middle of a pull, suspended, and restarted."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import httpx
import numpy as np
import pytest

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.plugins.parameter_server import server as parameter_server, upload as push
from pipelinerl.plugins.parameter_server.connection import VersionRecord
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.publisher import PullPublisher
from pipelinerl.plugins.parameter_server.shared_memory import Attachment
from pipelinerl.plugins.parameter_server.upload import Uploader
from pipelinerl.system.machine import free_ports
from tests.fakes import scripted_engine
from tests.fakes.parameter_server import (
    TOKEN,
    application,
    digest,
    flat,
    held,
    order,
    publication,
    soon,
    wait_until_saved,
)
from tests.fakes.served import as_process, in_thread
from tests.patience import PATIENCE_S, SOON_S

#: A layout larger than socket and pipe buffers, so that a server killed after the first part cannot have sent the rest.
LARGE = WeightLayout(parameters=(ParameterSpec(name="a", shape=(10, 2**20), dtype=DType.FLOAT32),))

Server = tuple[str, "subprocess.Popen[str]"]


@pytest.fixture
def server():
    with as_process("tests.fakes.parameter_server") as started:
        yield started


@pytest.fixture
def replica():
    with in_thread(application()) as url:
        yield url


def place(*urls):
    with closing(Uploader(urls, token=TOKEN)) as placement:
        placed = placement.upload(publication(1, layout=LARGE), {}, deadline=soon())
    assert placed.failed == {} and placed.digest == digest(1, LARGE)


def test_weights_mapped_from_shared_memory_outlive_their_server_and_leave_no_file(server):
    url, process = server
    place(url)
    headers = {"authorization": f"Bearer {TOKEN}"}
    record = VersionRecord.model_validate(httpx.get(url + "/versions/1/1", headers=headers).json())
    assert record.segment is not None
    mapped = Attachment.to(record.segment)
    process.kill()
    process.wait(PATIENCE_S)
    assert mapped is not None and np.array_equal(mapped.bytes, flat(1, LARGE))
    assert Attachment.to(record.segment) is None, "the memory of a dead server can no longer be mapped"
    sizes = {entry.stat().st_size for entry in os.scandir("/dev/shm") if "pipelinerl" in entry.name}
    assert LARGE.num_bytes not in sizes, "no file may be left (files of concurrent tests have other sizes)"


def test_shared_memory_segment_with_a_wrong_name_is_not_mapped(server):
    url, _ = server
    place(url)
    record = VersionRecord.model_validate(
        httpx.get(url + "/versions/1/1", headers={"authorization": f"Bearer {TOKEN}"}).json()
    )
    assert record.segment is not None and Attachment.to(record.segment) is not None
    assert Attachment.to(record.segment.model_copy(update={"name": "pipelinerl-1-2-3"})) is None
    assert Attachment.to(record.segment.model_copy(update={"fd": 0})) is None
    reader = Attachment.to(record.segment)
    assert reader is not None and not reader.bytes.flags.writeable, "only the trainer may write to the memory"


def test_pull_of_weights_from_a_suspended_server_fails_at_the_deadline(server):
    url, process = server
    place(url)
    into = np.zeros(LARGE.num_bytes, np.uint8)
    began = time.monotonic()
    try:
        with pytest.raises(DeadlineError, match="did not arrive in time"):
            WeightPuller(token=TOKEN, shared_memory=False).fetch(
                order(1, url, layout=LARGE, timeout_s=3.0),
                into=into,
                on_progress=lambda _: os.kill(process.pid, signal.SIGSTOP),
            )
        assert 1.5 < time.monotonic() - began < SOON_S
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_client_that_stops_reading_does_not_make_a_server_keep_a_version_forever(replica, monkeypatch):
    monkeypatch.setattr(parameter_server, "BODY_TIMEOUT_S", 3.0)
    address = ("127.0.0.1", int(replica.rpartition(":")[2]))
    with (
        closing(Uploader([replica], token=TOKEN)) as placement,
        socket.create_connection(address, timeout=PATIENCE_S) as reader,
    ):
        for version in (1, 2):
            placement.upload(publication(version, layout=LARGE), {}, deadline=soon())
        reader.sendall(f"GET /weights/1/1 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert reader.recv(1024).startswith(b"HTTP/1.1 200")
        placement.confirm(1, {}, deadline=soon())
        assert held(replica) == [(1, 1), (1, 2)], "1.1 must be kept while it is being read"
        deadline = soon()
        while held(replica) != [(1, 2)]:
            assert time.monotonic() < deadline, "1.1 is still held for a client that stopped reading"
            time.sleep(0.05)


def test_cancelled_pull_of_weights_from_a_suspended_server_ends_without_waiting(server):
    url, process = server
    place(url)
    pull = order(1, url, layout=LARGE, timeout_s=PATIENCE_S)

    def stop(_):
        os.kill(process.pid, signal.SIGSTOP)
        pull.given_up.set()

    began = time.monotonic()
    try:
        with pytest.raises(UpdateError, match="cancelled"):
            WeightPuller(token=TOKEN, shared_memory=False).fetch(
                pull, into=np.zeros(LARGE.num_bytes, np.uint8), on_progress=stop
            )
        assert time.monotonic() - began < SOON_S
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("by_memory", [True, False], ids=["memory", "http"])
def test_upload_of_weights_to_a_killed_server_is_repeated_after_its_restart(by_memory):
    (port,) = free_ports(1)
    url, command = f"http://127.0.0.1:{port}", [sys.executable, "-m", "tests.fakes.parameter_server", str(port)]
    gathered = []
    with ExitStack() as stack:
        first = _started(stack, command)

        def fatal():
            gathered.append(1)
            for name, array in publication(1).weights():
                if len(gathered) == 1 and name == "head":
                    first.kill()
                    first.wait(PATIENCE_S)
                    _started(stack, command)
                yield name, array

        with closing(Uploader([url], token=TOKEN, shared_memory=by_memory)) as placement:
            placed = placement.upload(publication(1, weights=fatal), {}, deadline=soon())
        assert placed.digest == digest(1) and placed.failed == {}
        assert len(gathered) == 2, "the weights must be gathered again for the restarted server"
        assert held(url) == [(1, 1)]


def test_upload_of_weights_skips_a_suspended_replica(server, replica, monkeypatch):
    url, process = server
    monkeypatch.setattr(push, "_ANSWER_S", 3.0)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with closing(Uploader([url, replica], token=TOKEN)) as placement:
            placed = placement.upload(publication(1), {}, deadline=soon())
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert placed.sources == ((replica,),) and "was not answered in time" in placed.failed[url]


async def test_weights_can_be_published_after_the_only_parameter_server_was_restarted(tmp_path):
    """The only server dies after version 1 and restarts with its saved copy; then version 2 is published through it."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.fakes.parameter_server", str(port), str(tmp_path / "copies")]
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        first = _started(stack, command)
        engine = stack.enter_context(in_thread(scripted_engine.application(token=TOKEN)))
        async with EngineClient(token=TOKEN) as client:
            publisher = PullPublisher(client, Uploader([url], token=TOKEN))
            stack.callback(publisher._placement.close)
            layout = scripted_engine.LAYOUT
            await publisher.publish(publication(1, (engine,), layout=layout, timeout_s=PATIENCE_S))
            wait_until_saved(url, (1, 1))
            first.kill()
            first.wait(PATIENCE_S)
            _started(stack, command)
            assert (1, 1) in held(url)
            report = await publisher.publish(publication(2, (engine,), layout=layout, timeout_s=PATIENCE_S))
            assert report.failed == {} and list(report.pauses_s) == [engine]
            assert (await client.health(engine)).model_version == 2
            assert held(url) == [(1, 2)]


def _started(stack, command):
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()
    return process
