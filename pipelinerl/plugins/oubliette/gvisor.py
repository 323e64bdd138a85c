"""The strong tier: each run in its own gVisor sandbox, `runsc`, whose kernel is a user-space program.

That kernel answers the program's system calls, and may itself make only a few calls to the host. The program sees the
same files as in the default tier, and has no network; its /tmp is memory of the sandbox. The platform is `ptrace`,
which needs no processor support; `kvm` can hang even where /dev/kvm exists.

    waits for                    at most                                      then
    a run's output and its end   its deadline + `_BOOT_S` + time without a    all in its control group are killed
                                 processor, up to `_STARVED_TIMES` · the deadline

A sandbox costs a fifth of a second of processor time; none is kept warm. Its control group, which this tier requires,
limits memory and time of all its processes together. A run's limits are raised by `_OWN_BYTES` of memory and
`_BOOT_CPU_S` of processor time, which gVisor itself needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pipelinerl.plugins.oubliette import bubblewrap, control_groups, syscall_filter, toolchains
from pipelinerl.plugins.oubliette.control_groups import ControlGroup
from pipelinerl.plugins.oubliette.runs import ENVIRONMENT, Ending, Limits, ProgramResult, Run, SandboxLost, Tier
from pipelinerl.plugins.oubliette.slot import Outputs, SlotGroup
from pipelinerl.system.supervised_process import tied

_ID: Final = 1000
_FLAGS: Final = (
    "--platform=ptrace", "--network=none", "--ignore-cgroups", "--oci-seccomp", "--host-uds=none", "--log-format=json",
)  # fmt: skip


def executable() -> str | None:
    """Return the path of runsc, or None if it is not installed."""
    return shutil.which("runsc")


def command(bundle: Path) -> tuple[str, ...]:
    """Return the runsc command for a bundle folder; the sandbox ends with the thread that starts the command."""
    program = executable()
    assert program is not None, "callers check that runsc is installed"
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    state = (f"--root={bundle / 'state'}", f"--log={bundle / 'log'}")
    command = [program, *state, *_FLAGS, *rootless, "run", f"--bundle={bundle}", bundle.name]
    return tuple(tied(command, python=str(bubblewrap.interpreter())))


def lay_out(bundle: Path, run: Run) -> None:
    """Write a run's files and runsc's configuration into the bundle folder."""
    bundle.chmod(0o755)  # runsc runs as another user, who must be able to read the bundle
    root, given = bundle / "root", bundle / "given"
    given.mkdir()
    (bundle / "stdin").write_bytes(run.stdin)
    mounts = [_mount("proc", "/proc", "proc"), _mount("tmpfs", "/tmp", "tmpfs", f"size={run.limits.disk_bytes}")]
    for name, data in run.files:
        file = given / name
        file.write_bytes(data)
        file.chmod(0o755)
        mounts.append(_mount("bind", f"/tmp/{name}", str(file), "ro"))
    for place in ("tmp", "proc", "dev", "sys", "etc"):
        (root / place).mkdir(parents=True)
    python = bubblewrap.interpreter()
    for path in bubblewrap.shown(python, toolchains.folders()):
        inside = root / path.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and path.parent == Path("/"):
            inside.symlink_to(os.readlink(path))
            continue
        if path.is_dir():
            inside.mkdir(exist_ok=True)
        else:
            inside.touch()
        mounts.append(_mount("bind", str(path), str(path), "ro", "rbind"))
    argv = [*run.argv, *run.arguments] if run.argv else [str(python), "-I", run.python, *run.arguments]
    config = {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": False,
            "user": {"uid": _ID, "gid": _ID},
            "args": argv,
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/tmp",
            "capabilities": {},
            "noNewPrivileges": True,
            "rlimits": [
                {"type": name, "soft": soft, "hard": hard} for name, (soft, hard) in run.limits.rlimits().items()
            ],
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "guest",
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "seccomp": syscall_filter.as_oci(),
        },
    }
    (bundle / "config.json").write_text(json.dumps(config))


def _mount(kind: str, where: str, source: str, *options: str) -> dict[str, Any]:
    return {"type": kind, "destination": where, "source": source, "options": ["nosuid", "nodev", *options]}


def troubles(bundle: Path) -> str:
    """Return the errors that runsc logged."""
    errors = []
    with contextlib.suppress(FileNotFoundError):
        for line in (bundle / "log").read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("level") == "error":
                    errors.append(str(entry.get("msg")))
    return "; ".join(errors)


_BOOT_S: Final = 5.0
_BOOT_CPU_S: Final = 1.0
_OWN_BYTES: Final = 256 << 20
_STARVED_TIMES: Final = 5.0
_GRACE_S: Final = 30.0
_TICK_S: Final = 0.02
#: Seconds after which a sandbox has usually started.
_USUAL_BOOT_S: Final = 0.5
_GREEDY_CPU_S: Final = 0.5
_SIGNALLED: Final = 128
_OUT_OF_TIME: Final = frozenset({signal.SIGXCPU, signal.SIGKILL})
#: Error that runsc logs if the program cannot be executed.
_NO_PROGRAM: Final = "creating process: failed to load"


class GvisorSlot:
    """Slot of the strong tier: runs one program at a time, each in a new sandbox. For use from one thread."""

    def __init__(self) -> None:
        self.group = SlotGroup(own_bytes=_OWN_BYTES, greedy_cpu_s=_GREEDY_CPU_S)
        self._ended = threading.Event()
        self.began: float | None = None

    def start(self) -> None:
        """Do nothing, since each run starts its own sandbox."""

    def run(self, run: Run) -> ProgramResult:
        """Run a program. Raises `SandboxLost` if the sandbox cannot be started, or ends by itself."""
        limits = run.limits
        self.group.admit(limits)
        group = self.group.group
        if group is None:
            raise SandboxLost(f"gVisor's processes need a control group: {control_groups.available()}")
        self.group.begin()
        with tempfile.TemporaryDirectory(prefix="oubliette-", ignore_cleanup_errors=True) as folder:
            bundle = Path(folder)
            lay_out(bundle, run)
            with (bundle / "stdin").open("rb") as stdin:
                process = subprocess.Popen(
                    group.entering(command(bundle)), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env={}, cwd="/",
                )  # fmt: skip
            assert process.stdout is not None and process.stderr is not None, "both are pipes"
            outputs = Outputs(process.stdout.fileno(), process.stderr.fileno(), limits)
            began = time.monotonic()
            self.began = began + _USUAL_BOOT_S
            try:
                with process:
                    try:
                        ended = self._until_it_ends(process.pid, group, outputs, limits, began)
                        wall_s = time.monotonic() - began
                    finally:
                        group.kill_all()
                    for file in outputs.files:
                        while outputs.take(file):
                            pass
                    code = process.wait(_GRACE_S)
                errors = troubles(bundle)
            finally:
                self.began = None
        if self._ended.is_set():
            raise SandboxLost("the sandbox was stopped")
        cpu_s = self.group.cpu_s()
        if self.group.ran_out_of_memory():
            ended = Ending.MEMORY
        elif ended is None and _NO_PROGRAM in errors:
            code, outputs.stderr[:] = 126, errors.encode()
        elif ended is None and (code < 0 or errors):
            raise SandboxLost(f"gVisor ended by itself ({code}); its output: {errors or outputs.stderr[:500]!r}")
        if ended is None and code > _SIGNALLED:
            # A program that a signal ended gets the exit code 128 + the signal's number, as in a shell.
            code = _SIGNALLED - code
            ended = Ending.CPU_TIME if cpu_s >= limits.cpu_s and -code in _OUT_OF_TIME else Ending.SIGNALLED
        return ProgramResult(
            ending=ended or Ending.EXITED,
            code=code,
            stdout=bytes(outputs.stdout),
            stderr=bytes(outputs.stderr),
            cpu_s=cpu_s,
            wall_s=wall_s,
            tier=Tier.STRONG,
        )

    def _until_it_ends(
        self, pid: int, group: ControlGroup, outputs: Outputs, limits: Limits, began: float
    ) -> Ending | None:
        """Wait for the run's end; return the reason why the run must be killed, or None if it ended by itself."""
        until, waiting = began + limits.wall_s + _BOOT_S, set(outputs.files)
        handle = os.pidfd_open(pid)
        try:
            poll = select.poll()
            for file in (handle, *waiting):
                poll.register(file, select.POLLIN)
            while True:
                ready = [file for file, _ in poll.poll(1000 * _TICK_S)]
                for file in waiting.intersection(ready):
                    if not outputs.take(file):
                        waiting.discard(file)
                        poll.unregister(file)
                if outputs.are_too_long:
                    return Ending.OUTPUT
                if handle in ready:
                    return None
                if self.group.cpu_s() > limits.cpu_s + _BOOT_CPU_S:
                    return Ending.CPU_TIME
                if time.monotonic() > until:
                    delayed_s = _delayed_s(group.processes())
                    until = began + min(limits.wall_s + _BOOT_S + delayed_s, _STARVED_TIMES * limits.wall_s)
                    if until <= time.monotonic():
                        had_s = time.monotonic() - began - delayed_s
                        return Ending.STARVED if had_s < limits.wall_s / 2 else Ending.DEADLINE
        finally:
            os.close(handle)

    def interrupt(self) -> None:
        """End the current run and reject later runs; called by other threads."""
        self._ended.set()
        if self.group.group is not None:
            self.group.group.kill_all()

    def close(self) -> None:
        self.group.close()


def _delayed_s(processes: Sequence[int]) -> float:
    """Return the longest time, in seconds, for which a single thread waited for a processor."""
    longest = 0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                longest = max(longest, int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]))
    return longest / 1e9
