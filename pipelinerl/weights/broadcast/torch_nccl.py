"""NCCL process groups whose failures are errors in the calling thread, within a deadline.

By default torch's watchdog ends the whole process when a rank dies. `connect` turns that off for its own group only;
other groups of the process, such as a trainer's, keep torch's behaviour. A work is also complete when it has failed, so
`wait_for` checks for an exception, and the owner of a failed group aborts it with `abort`.

Communicators do not block: a thread connects, and its caller waits until the deadline. What torch waits for inside such
a thread ends after `TORCH_NCCL_NONBLOCKING_TIMEOUT` seconds.

No GPU has run this module. Its tests use gloo's works and a fake with torch's published signatures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch

from pipelinerl.system.background import in_background

#: Torch reads these when it builds a group: the watchdog neither ends the process nor writes traces.
_WITHOUT_WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_environment = threading.Lock()

#: Torch's default of 30 minutes would keep the thread of an abandoned connection that long.
_LONGEST_CONNECT_S: Final = 120
_ABORT_S: Final = 5.0
_POLL_S: Final = 2e-4


def connect(library: Any, store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Return a group whose ranks have all connected; blocks for `timeout_s` at most.

    Args:
        library: `torch.distributed`.

    Raises:
        RuntimeError: a rank is missing, or NCCL failed. The group has been aborted.
    """
    deadline = time.monotonic() + timeout_s
    options = library.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(_LONGEST_CONNECT_S))
    with _variables(_WITHOUT_WATCHDOG):
        group = library.ProcessGroupNCCL(store, rank, size, options)
    connecting = in_background(f"connect-{rank}", lambda: _meet(library, group, device, deadline))
    try:
        connecting.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        abort(group)
        raise RuntimeError(f"NCCL timed out: not every rank connected within {timeout_s:g} s") from None
    except RuntimeError:
        abort(group)
        raise
    return group


def wait_for(work: Any, *, deadline: float) -> None:
    """Wait until the bytes of `work` have arrived; torch's own wait only orders streams.

    Raises:
        RuntimeError: the work failed, or is not complete by `deadline` (monotonic seconds).
    """
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")
        time.sleep(_POLL_S)
    error = work.exception()
    if error is not None:
        raise RuntimeError(str(error) or type(error).__name__)
    work.wait()


def abort(group: Any) -> None:
    """End all work of the group and free its communicator; errors are ignored, since the group is given up.

    Returns after `_ABORT_S` even if NCCL has not: an abort waits for a thread that still connects.
    """
    wait([in_background("abort", group.abort)], timeout=_ABORT_S)


def _meet(library: Any, group: Any, device: torch.device, deadline: float) -> None:
    # NCCL connects at the first collective. One byte connects now, so that a missing rank is detected here.
    group.eager_connect_single_device(device)
    options = library.BroadcastOptions()
    options.rootRank = 0
    wait_for(group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], options), deadline=deadline)


@contextmanager
def _variables(changed: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block, one block at a time."""
    with _environment:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
