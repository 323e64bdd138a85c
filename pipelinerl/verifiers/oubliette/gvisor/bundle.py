"""A run in the form that runsc needs: a bundle folder with files and configuration. Also reads errors that runsc
logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipelinerl.system import tied_process
from pipelinerl.verifiers.oubliette import bubblewrap, syscall_filter, toolchains
from pipelinerl.verifiers.oubliette.runs import Run

_ID: Final = 1000
_ENVIRONMENT: Final = ("PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp", "TMPDIR=/tmp", "LANG=C.UTF-8")
_FLAGS: Final = (
    "--platform=ptrace", "--network=none", "--ignore-cgroups", "--oci-seccomp", "--host-uds=none", "--log-format=json",
)  # fmt: skip


def executable() -> str | None:
    """Return the path of runsc, if it is installed."""
    return shutil.which("runsc")


def command(bundle: Path) -> tuple[str, ...]:
    """Return the runsc command; the sandbox ends with this thread. Without root, runsc creates a user namespace."""
    program = executable()
    assert program is not None, "callers check that runsc is installed"
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    tie = (str(bubblewrap.interpreter()), "-S", "-E", tied_process.__file__, str(os.getpid()), "SIGKILL", "", "--")
    state = (f"--root={bundle / 'state'}", f"--log={bundle / 'log'}")
    return (*tie, program, *state, *_FLAGS, *rootless, "run", f"--bundle={bundle}", bundle.name)


def lay_out(bundle: Path, run: Run) -> None:
    """Write the files of a run and runsc's configuration into the bundle folder."""
    bundle.chmod(0o755)  # runsc runs as another user, who must read it
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
    """Return the errors that runsc itself logged."""
    return "; ".join(_errors((bundle / "log").read_text() if (bundle / "log").exists() else ""))


def _errors(log: str) -> Iterator[str]:
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("level") == "error":
                yield str(entry.get("msg"))
