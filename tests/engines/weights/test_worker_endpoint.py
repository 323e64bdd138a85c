"""The endpoint of a worker process: bytes arrive in shared memory, and a lost peer is detected immediately."""

import multiprocessing
import socket
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest
import torch

from inference_contract.weights import Backend
from pipelinerl.engines.weights import torch_endpoint
from pipelinerl.engines.weights.torch_endpoint import serve_endpoints
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes, attach, check_room
from pipelinerl.engines.weights.worker_endpoint import WorkerEndpoint, WorkerEndpointFactory
from pipelinerl.errors import DeadlineError, ModelError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous
from tests.fakes.groups import joining, rank
from tests.patience import PATIENCE_S, SOON_S

SIZE = 64


def _work(endpoints, shared, met):
    serve_endpoints(endpoints, attach(shared, SIZE), torch.device("cpu"))
    met()
    time.sleep(600)


class Setting:
    """A worker, the shared memory that it maps, and rank 0 of its groups."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.endpoints = WorkerEndpointFactory(frozenset([Backend.GLOO]))
        met = spawn.Event()
        with SharedBytes(SIZE) as shared, self.endpoints.accept_worker() as socket_path:
            self.worker = spawn.Process(target=_work, args=(socket_path, shared.path, met.set), daemon=True)
            self.worker.start()
            assert met.wait(PATIENCE_S)
        self.memory = shared.tensor
        self.rendezvous = Rendezvous("127.0.0.1")
        self.generation = 0
        self.joined = []

    def pair(self, *, timeout_s=PATIENCE_S):
        """Form a group of the next generation; return its rank 0, and the endpoint that joined for the worker."""
        self.generation += 1
        root = rank(self.rendezvous, generation=self.generation, timeout_s=timeout_s)
        endpoint = self.endpoints.join(self.request(timeout_s))
        assert isinstance(endpoint, WorkerEndpoint)
        self.joined.append(endpoint)
        return root.result(), endpoint

    def request(self, timeout_s):
        return joining(self.rendezvous.port, self.generation, timeout_s=timeout_s)

    def close(self):
        for endpoint in self.joined:
            endpoint.close()
        self.worker.kill()
        self.worker.join()
        self.endpoints.close()
        self.rendezvous.close()


@pytest.fixture(scope="module")
def setting():
    made = Setting()
    yield made
    made.close()


def receiving(endpoint, part, timeout_s=PATIENCE_S):
    return in_background("receive", lambda: endpoint.broadcast(part, deadline=time.monotonic() + timeout_s))


def test_broadcast_bytes_arrive_at_their_offsets_in_two_successive_process_groups(setting):
    for first in (1, 2):
        root, endpoint = setting.pair()
        for start, end in ((0, 40), (40, SIZE)):
            came = receiving(endpoint, setting.memory[start:end])
            data = torch.full([end - start], first + start, dtype=torch.uint8)
            root.broadcast(data, deadline=time.monotonic() + PATIENCE_S)
            came.result(PATIENCE_S)
        assert setting.memory.tolist() == [first] * 40 + [first + 40] * 24
        endpoint.close()


def test_rank_0_detects_immediately_that_the_engine_has_left_the_process_group(setting):
    root, endpoint = setting.pair()
    began = time.monotonic()
    endpoint.close()
    # The first send may complete before the other end is closed; the second cannot.
    with pytest.raises(UpdateError):
        for _ in range(2):
            root.broadcast(torch.zeros(2**22, dtype=torch.uint8), deadline=began + PATIENCE_S)
    assert time.monotonic() - began < SOON_S
    with pytest.raises(UpdateError, match=r"this process (has )?left"):
        endpoint.broadcast(setting.memory, deadline=time.monotonic() + 1)


def test_weight_receive_times_out_if_rank_0_is_silent_and_fails_immediately_if_rank_0_leaves(setting):
    root, endpoint = setting.pair()
    with pytest.raises(DeadlineError, match="timed out, not every rank took part"):
        endpoint.broadcast(setting.memory, deadline=time.monotonic() + 0.3)
    root.close()
    root, endpoint = setting.pair()
    began, came = time.monotonic(), receiving(endpoint, setting.memory, PATIENCE_S)
    root.close()
    with pytest.raises(UpdateError):
        came.result(PATIENCE_S)
    assert time.monotonic() - began < SOON_S


def test_weight_receive_ends_only_after_the_worker_has_stopped_writing(setting):
    """If the receive ended earlier, two updates could write to the same staging memory."""
    root, endpoint = setting.pair()
    came = receiving(endpoint, setting.memory, 5.0)
    time.sleep(0.2)
    endpoint.close()
    time.sleep(0.2)
    assert not came.done()  # the worker still writes, because gloo receives until its deadline
    with pytest.raises((DeadlineError, UpdateError)):
        came.result(PATIENCE_S)
    root.close()


def test_weight_receive_fails_immediately_when_the_worker_dies():
    with closing(Setting()) as setting:
        _, endpoint = setting.pair()
        came = receiving(endpoint, setting.memory, PATIENCE_S)
        setting.worker.kill()
        with pytest.raises(UpdateError, match="the worker has ended"):
            came.result(PATIENCE_S)
        setting.generation += 1
        with pytest.raises(UpdateError, match="worker has ended"):
            setting.endpoints.join(setting.request(PATIENCE_S))


def test_weight_receive_fails_with_the_workers_out_of_memory_error(monkeypatch):
    """The worker reports torch's exception at once, so the engine does not wait until the receive's deadline."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    endpoints = WorkerEndpointFactory(frozenset([Backend.GLOO]))
    with SharedBytes(SIZE) as shared, endpoints.accept_worker() as path:
        serve_endpoints(path, attach(shared.path, SIZE), torch.device("cpu"))
    with closing(endpoints), closing(Rendezvous("127.0.0.1")) as rendezvous:
        root = rank(rendezvous)
        endpoint = endpoints.join(joining(rendezvous.port))
        assert isinstance(endpoint, WorkerEndpoint)
        with closing(root.result()), closing(endpoint):
            monkeypatch.setattr(Collective, "broadcast", full)
            with pytest.raises(UpdateError, match="worker's cpu failed: OutOfMemoryError: CUDA out of memory"):
                receiving(endpoint, shared.tensor, PATIENCE_S).result(PATIENCE_S)


def test_worker_receives_on_one_stream_that_first_waits_for_kernels_queued_earlier(monkeypatch):
    """Without the wait, a piece could overwrite memory that an earlier kernel still reads."""
    events = []

    class Stream:
        def wait_stream(self, other):
            events.append(f"wait for {other}")

    class Group:
        device = torch.device("cuda")

        def broadcast(self, tensor, *, deadline):
            events.append(f"receive {tensor.numel()}")
            tensor.fill_(7)

    def current(stream):
        events.append(f"enter {type(stream).__name__}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "decoding")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        staged = torch.zeros(SIZE, dtype=torch.uint8)
        membership = torch_endpoint._Membership(theirs, staged, torch.device("cpu"))
        membership._group = Group()
        for start, end in ((0, 40), (40, SIZE)):
            membership._receive(start, end, deadline=time.monotonic() + PATIENCE_S)
    assert events == ["wait for decoding", "enter Stream", "receive 40", "enter Stream", "receive 24"]
    assert staged.tolist() == [7] * SIZE


def test_joining_a_process_group_that_no_other_rank_joins_times_out(setting):
    setting.generation += 1
    with pytest.raises(DeadlineError, match="as rank 1 of 2"):
        setting.endpoints.join(setting.request(0.3))
    root, _ = setting.pair()  # the next group forms normally
    root.close()


def test_engine_supports_exactly_the_collective_backends_of_its_worker():
    host = torch.zeros(1, dtype=torch.uint8)
    assert not WorkerEndpointFactory(frozenset([Backend.GLOO])).reaches(Backend.NCCL, host)
    assert WorkerEndpointFactory(frozenset(Backend)).reaches(Backend.NCCL, host)


def test_worker_that_never_connects_is_an_error_and_leaves_no_socket():
    endpoints = WorkerEndpointFactory(frozenset())
    with pytest.raises(UpdateError, match="no worker has connected"), endpoints.accept_worker() as path:
        assert path.is_socket()
    assert not path.parent.exists()
    with suppress(KeyError), endpoints.accept_worker() as path:
        raise KeyError
    assert not path.parent.exists()


def test_engine_rejects_too_little_shared_memory_and_names_the_remedy(tmp_path):
    check_room(1, folder=tmp_path)
    check_room(2**60, folder=tmp_path / "missing")
    with pytest.raises(ModelError, match=r"needs 1,048,576 MiB of shared memory, .* --shm-size=1025g or more"):
        check_room(2**40, folder=Path("/dev/shm"))
