"""The process that forks an engine's endpoints, so that torch is imported only once; see `own_process`.

    python -m pipelinerl.engines.external.worker.nursery_torch LINE MEMORY      inherited file descriptors

This process receives no weights itself. It ends when the engine closes LINE, its socket, or dies.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys

import numpy as np
import torch

from pipelinerl.engines.external.worker.torch_endpoint import serve_membership
from pipelinerl.weights.broadcast import collective  # noqa: F401  imported before the forks, not after each


def main(line: int, memory: int) -> None:
    """Fork a process for each group membership, whose socket arrives over `line`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the forked processes automatically
    staged = torch.from_numpy(np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), np.uint8))
    with socket.socket(fileno=line) as door:
        while True:
            greeting, ends, _, _ = socket.recv_fds(door, 1, 1)
            if not greeting:
                return
            with socket.socket(fileno=ends[0]) as end:
                if os.fork() == 0:
                    door.close()
                    try:
                        serve_membership(end, staged, torch.device("cpu"))
                    finally:
                        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
