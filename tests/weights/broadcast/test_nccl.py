"""Failures of an NCCL weight group raise an error by the deadline, and never end the process."""

import ast
import os
import threading
import time
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed
from torch._C import _distributed_c10d as published

from inference_contract.weights import Backend
from pipelinerl.errors import UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast.collective import Collective, connect_nccl, wait_for_nccl
from tests.patience import PATIENCE_S, SOON_S


@final
class NcclLibrary:
    """Stands in for `torch.distributed`; the process group that it creates is kept as `group`."""

    BroadcastOptions = torch.distributed.BroadcastOptions

    def __init__(self, work, *, connects=True):
        """Let every broadcast return `work`. If `connects` is false, connecting blocks until the group is aborted."""
        library = self
        self.group: Any = None

        @final
        class ProcessGroupNCCL:
            class Options:
                def __init__(self):
                    self.config = NCCLConfig()
                    self._timeout: Any = None

            def __init__(self, store, rank, size, options):
                self.variables = dict(os.environ)
                self.blocking = options.config.blocking
                self.aborted = threading.Event()
                library.group = self

            def eager_connect_single_device(self, device):
                if not connects:
                    self.aborted.wait()
                    raise RuntimeError("NCCL communicator was aborted on rank 0")

            def broadcast(self, tensors, options):
                return work

            def abort(self):
                self.aborted.set()

        class NCCLConfig:
            blocking = -(2**31)

        self.ProcessGroupNCCL = ProcessGroupNCCL
        verify(ProcessGroupNCCL, NCCLConfig)


@final
class FailedWork:
    """The handle of a failed broadcast. Like NCCL's, it counts as completed, and `wait` raises the error."""

    def is_completed(self):
        return True

    def exception(self):
        raise TypeError("Unable to convert function return value to a Python type!")  # as torch 2.11 does

    def wait(self):
        raise RuntimeError("NCCL error: remote process exited or there was a network error")


def verify(group, config):
    """Raise `AssertionError` if the fake has a method, a field or a parameter that torch does not."""
    stub = Path(str(torch.__path__[0])) / "_C" / "_distributed_c10d.pyi"
    classes = {node.name: node for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.ClassDef)}
    names = {name for name in vars(group) if not name.startswith("_")}
    assert names <= {"Options"} | set(dir(published.Backend)), names
    assert names - {"Options"} <= {*dir(published.Backend)}
    fields = {node.target.id for node in classes["NCCLConfig"].body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert "blocking" in fields and hasattr(config, "blocking")
    (made,) = (
        node
        for node in classes["ProcessGroupNCCL"].body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    assert [each.arg for each in made.args.args] == ["self", "store", "rank", "size", "options"]
    assert {name for name in vars(FailedWork) if not name.startswith("_")} <= set(dir(published.Work))


CPU = torch.device("cpu")


class _Done:
    def is_completed(self):
        return True

    def exception(self):
        raise TypeError("Unable to convert function return value to a Python type!")  # as torch 2.11 does

    def wait(self):
        return True


class _Broken(_Done):
    def is_completed(self):
        raise TypeError("an error that no caller expects")


def _connect(library, timeout_s=PATIENCE_S):
    return connect_nccl(library, None, rank=0, size=2, device=CPU, timeout_s=timeout_s)


def test_nccls_watchdog_is_disabled_only_while_a_weight_group_is_created(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group = _connect(NcclLibrary(_Done()))
    assert group.variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert group.variables["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert group.blocking == 0 and not group.aborted.is_set()


def test_connecting_an_nccl_group_with_a_missing_rank_is_aborted_at_the_deadline():
    library, began = NcclLibrary(_Done(), connects=False), time.monotonic()
    with pytest.raises(RuntimeError, match="NCCL timed out"):
        _connect(library, timeout_s=0.2)
    assert library.group.aborted.is_set() and time.monotonic() - began < SOON_S


@pytest.mark.parametrize("work", [FailedWork(), _Broken()], ids=["failed", "an error that no caller expects"])
def test_nccl_group_whose_connection_failed_is_aborted(work):
    library = NcclLibrary(work)
    with pytest.raises((RuntimeError, TypeError), match=r"remote process exited|no caller expects"):
        _connect(library)
    assert library.group.aborted.is_set()


def test_failed_nccl_broadcast_raises_and_aborts_the_group():
    group = NcclLibrary(FailedWork()).ProcessGroupNCCL(None, 0, 2, NcclLibrary(_Done()).ProcessGroupNCCL.Options())
    collective = Collective(group, None, backend=Backend.NCCL, name="group 'g'")
    with pytest.raises(UpdateError, match="remote process exited"):
        collective.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=time.monotonic() + PATIENCE_S)
    assert group.aborted.is_set()
    with pytest.raises(UpdateError, match=r"this process (has )?left"):
        collective.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=time.monotonic() + PATIENCE_S)


def test_nccl_broadcast_aborted_by_another_thread_raises():
    class _Aborted(_Done):
        def is_completed(self):
            return bool(group.aborted.is_set())  # NCCL reports aborted work as completed, without an error

    library = NcclLibrary(_Aborted())
    group = library.ProcessGroupNCCL(None, 0, 2, library.ProcessGroupNCCL.Options())
    collective = Collective(group, None, backend=Backend.NCCL, name="group 'g'")
    deadline = time.monotonic() + PATIENCE_S
    sending = in_background("send", lambda: collective.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=deadline))
    collective.close()
    with pytest.raises(UpdateError, match=r"this process (has )?left"):
        sending.result(PATIENCE_S)


def test_error_of_failed_gloo_work_is_raised_although_the_work_counts_as_completed():
    """Work whose peer died counts as completed, so completion alone is no success."""
    store = torch.distributed.HashStore()
    make = lambda rank: torch.distributed.ProcessGroupGloo(store, rank, 2, _gloo_options())  # noqa: E731
    joins = [in_background(f"rank-{rank}", lambda rank=rank: make(rank)) for rank in (0, 1)]
    pair = [join.result(PATIENCE_S) for join in joins]
    joins.clear()
    work = pair[1].broadcast([torch.zeros(4, dtype=torch.uint8)], torch.distributed.BroadcastOptions())
    del pair[0]
    with pytest.raises(RuntimeError, match=r"pair\.cc"):
        wait_for_nccl(work, deadline=time.monotonic() + PATIENCE_S)
    assert work.is_completed()


def _gloo_options():
    options = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    return options
