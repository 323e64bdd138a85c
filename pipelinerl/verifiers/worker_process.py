"""The processes that judge: `python -m pipelinerl.verifiers.worker_process TARGET ARGUMENT`, one for each pool.

The process calls `TARGET(ARGUMENT)` (a reference), which does the heavy imports and returns a function from a JSON
question to a JSON answer. It then forks a worker for each socket that it receives over standard input, so a killed
worker is replaced within milliseconds. A worker reads one question per line. For each it writes one line
`[answer, processor seconds so far]`; output of the judging code goes to the actor's output. If the function raises, the
line is `{"error": reason}`, and the worker ends. When a worker ends, the process writes `[pid, return code]` to its
standard input, with a negative code for a signal, so that the pool can say why an answer is missing.

If forking is unsafe (the imports started threads) or untested (not Linux), the process itself becomes the only worker,
and the pool starts another process for the next worker. Each worker has its own process group, so its children are
killed with it. A worker dies with this process, and this process with the actor (`system/supervised_process.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl.errors import UserError
from pipelinerl.system.process import collect_as_usual, collect_rarely
from pipelinerl.system.references import last_line, load_reference

_PR_SET_PDEATHSIG = 1

#: Function from a question to its answer, both as parsed JSON.
Answering = Callable[[Any], Any]


def main() -> None:
    """Load the target, report whether this succeeded, and fork workers until the socket closes."""
    collect_rarely()
    target, argument = sys.argv[1:]
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        answering: Answering = load_reference(target)(argument)
    except UserError as error:
        _send(control, {"error": str(error)})
        return
    forks = sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a fork would copy the pages of imported objects
    collect_as_usual()
    signal.signal(signal.SIGCHLD, partial(_report_ended, control, os.getpid()))
    _send(control, {"forks": forks})
    while True:
        word, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not word or not handles:
            return
        with socket.socket(fileno=handles[0]) as connection:
            if not forks:
                _work(connection, answering)
                return
            parent = os.getpid()
            if os.fork() == 0:
                control.close()
                ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
                if os.getppid() != parent:
                    os._exit(1)
                _work(connection, answering)
                os._exit(0)


def _report_ended(control: socket.socket, own: int, *_: object) -> None:
    """Reap the workers that have ended, and report their return codes; runs as the handler of SIGCHLD."""
    if os.getpid() != own:
        return  # a fork, which has not reset its handler yet
    with contextlib.suppress(OSError):  # no child is left, or the actor is gone or reads nothing
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            line = json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode() + b"\n"
            control.send(line, socket.MSG_DONTWAIT)


def _work(connection: socket.socket, answering: Answering) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    own = os.getpid()
    try:
        _send(connection, [own, time.process_time()])
        with connection.makefile("rb") as questions:
            for line in questions:
                answer: Any
                try:
                    answer = [answering(json.loads(line)), time.process_time()]
                except BaseException as error:  # the judging code may raise anything
                    answer = {"error": last_line(error)}
                if os.getpid() != own:
                    os._exit(0)  # the judging code has forked, and only the original process may answer
                _send(connection, answer)
                if isinstance(answer, dict):
                    return
    except (BrokenPipeError, ConnectionResetError):
        return  # the actor is gone


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
