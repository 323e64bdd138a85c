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
from pipelinerl.plugins.oubliette.control_groups import ControlGroup, Hierarchies, Weight
from pipelinerl.plugins.oubliette.runs import Ending, Limits, ProgramResult, Run, SandboxLost, Tier
from pipelinerl.system.supervised_process import tied

_ID: Final = 1000
_ENVIRONMENT: Final = ("PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp", "TMPDIR=/tmp", "LANG=C.UTF-8")
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
            "env": _ENVIRONMENT,
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
_CHUNK: Final = 1 << 18
_SIGNALLED: Final = 128
_OUT_OF_TIME: Final = frozenset({signal.SIGXCPU, signal.SIGKILL})
#: Error that runsc logs if the program cannot be executed.
_NO_PROGRAM: Final = "creating process: failed to load"


class GvisorSlot:
    """Slot of the strong tier: runs one program at a time, each in a new sandbox. For use from one thread."""

    def __init__(self) -> None:
        self._group: ControlGroup | None = None
        self._cpu_began_s = 0.0
        self._ended = threading.Event()
        self.began: float | None = None

    def start(self) -> None:
        """Do nothing, since each run starts its own sandbox."""

    def run(self, run: Run) -> ProgramResult:
        """Run a program. Raises `SandboxLost` if the sandbox cannot be started, or ends by itself."""
        where = control_groups.available()
        if not isinstance(where, Hierarchies):
            raise SandboxLost(f"gVisor's processes need a control group: {where}")
        if self._group is None:
            self._group = ControlGroup(where)
        group = self._group
        limits = run.limits
        group.weigh(Weight.FULL)
        group.limit(limits.memory_bytes + limits.disk_bytes + _OWN_BYTES)
        kills, self._cpu_began_s = group.oom_kills(), group.cpu_s()
        with tempfile.TemporaryDirectory(prefix="oubliette-", ignore_cleanup_errors=True) as folder:
            bundle = Path(folder)
            lay_out(bundle, run)
            with (bundle / "stdin").open("rb") as stdin:
                process = subprocess.Popen(
                    group.entering(command(bundle)), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env={}, cwd="/",
                )  # fmt: skip
            self.began = time.monotonic() + _USUAL_BOOT_S
            try:
                with process:
                    watch = _Watch(process, group, limits, self._cpu_began_s)
                    try:
                        ended = watch.until_it_ends()
                    finally:
                        group.kill_all()
                    watch.drain()
                    code = process.wait(_GRACE_S)
                errors = troubles(bundle)
            finally:
                self.began = None
        if self._ended.is_set():
            raise SandboxLost("the sandbox was stopped")
        cpu_s = group.cpu_s() - self._cpu_began_s
        if group.oom_kills() > kills:
            ended = Ending.MEMORY
        elif ended is None and _NO_PROGRAM in errors:
            code, watch.stderr[:] = 126, errors.encode()
        elif ended is None and (code < 0 or errors):
            raise SandboxLost(f"gVisor ended by itself ({code}); its output: {errors or watch.stderr[:500]!r}")
        if ended is None and code > _SIGNALLED:
            # A program that a signal ended gets the exit code 128 + the signal's number, as in a shell.
            code = _SIGNALLED - code
            ended = Ending.CPU_TIME if cpu_s >= limits.cpu_s and -code in _OUT_OF_TIME else Ending.SIGNALLED
        return ProgramResult(
            ending=ended or Ending.EXITED,
            code=code,
            stdout=bytes(watch.stdout),
            stderr=bytes(watch.stderr),
            cpu_s=cpu_s,
            wall_s=watch.wall_s,
            tier=Tier.STRONG,
        )

    def cpu_s(self) -> float:
        """Return the processor seconds of the slot's sandboxes so far."""
        return 0.0 if self._group is None else self._group.cpu_s()

    def goes_behind(self) -> bool:
        """If the current run has used much processor time, lower its processor share and return True. Thread-safe."""
        if self._group is None or self.began is None or self._group.cpu_s() - self._cpu_began_s < _GREEDY_CPU_S:
            return False
        self._group.weigh(Weight.BEHIND_OTHERS)
        return True

    def interrupt(self) -> None:
        """End the current run and reject later runs; called by other threads."""
        self._ended.set()
        if self._group is not None:
            self._group.kill_all()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Watch:
    def __init__(
        self, process: subprocess.Popen[bytes], group: ControlGroup, limits: Limits, cpu_began_s: float
    ) -> None:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        self._process = process
        self._group = group
        self._limits = limits
        self._cpu_began_s = cpu_began_s
        self._began = time.monotonic()
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self._open = {self._out, self._err}
        self.stdout, self.stderr = bytearray(), bytearray()
        self.wall_s = 0.0

    def until_it_ends(self) -> Ending | None:
        """Wait for the run's end; return the reason why the run must be killed, or None if it ended by itself."""
        limits, until = self._limits, self._began + self._limits.wall_s + _BOOT_S
        handle = os.pidfd_open(self._process.pid)
        try:
            poll = select.poll()
            for file in (handle, *self._open):
                poll.register(file, select.POLLIN)
            while True:
                ready = [file for file, _ in poll.poll(1000 * _TICK_S)]
                for file in self._open.intersection(ready):
                    if not self._take(file):
                        self._open.discard(file)
                        poll.unregister(file)
                self.wall_s = time.monotonic() - self._began
                if len(self.stdout) > limits.output_bytes:
                    return Ending.OUTPUT
                if handle in ready:
                    return None
                if self._group.cpu_s() - self._cpu_began_s > limits.cpu_s + _BOOT_CPU_S:
                    return Ending.CPU_TIME
                if time.monotonic() > until:
                    delayed_s = _delayed_s(self._group.processes())
                    until = self._began + min(limits.wall_s + _BOOT_S + delayed_s, _STARVED_TIMES * limits.wall_s)
                    if until <= time.monotonic():
                        return Ending.STARVED if self.wall_s - delayed_s < limits.wall_s / 2 else Ending.DEADLINE
        finally:
            os.close(handle)

    def drain(self) -> None:
        for file in self._open:
            while self._take(file):
                pass

    def _take(self, file: int) -> bool:
        part = os.read(file, _CHUNK)
        kept, most = (
            (self.stdout, self._limits.output_bytes) if file == self._out else (self.stderr, self._limits.error_bytes)
        )
        kept += part[: max(0, most + 1 - len(kept))]
        return bool(part)


def _delayed_s(processes: Sequence[int]) -> float:
    """Return the longest time, in seconds, for which a single thread waited for a processor."""
    longest = 0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                longest = max(longest, int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]))
    return longest / 1e9
