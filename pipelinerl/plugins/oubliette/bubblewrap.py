"""The bubblewrap command that starts a guest of the default tier: a sandboxed process tree around `guest/server.py`.

The guest sees the host's programs and libraries, read-only, and nothing else: no home, and of /etc only the files that
linking and toolchains need. Its only devices are null, random and urandom (/dev/zero would give uncounted memory). It
has its own /proc and network. Its root is not writable, so nothing passes from one run to the next.

As root, bubblewrap creates the guest without a user namespace, and the server keeps the three capabilities by which
each run gets its own user id. As any other user, it creates a user namespace, and a nested one for each run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

SERVER: Final = Path(__file__).with_name("guest") / "server.py"
_FOLDER_INSIDE: Final = "/run/guest"
#: Environment variable that makes the interpreter resolve all symbols once, at its start; otherwise each run would
#: resolve them again.
_LINKED_AT_ONCE: Final = ("LD_BIND_NOW", "1")
#: Folders in the host's root with programs and libraries; some may be symbolic links.
_PROGRAMS: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Files in /etc that a guest sees, for the linker, Debian's alternatives, and Java's time zone.
_OF_ETC: Final = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
#: Folders in /etc with settings that Java needs to start.
_JAVA: Final = "java-*-openjdk"
_DEVICES: Final = ("null", "random", "urandom")
_RIGHTS: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN")


def executable() -> str | None:
    """Return the path of bubblewrap, or None if it is not installed."""
    return shutil.which("bwrap")


def interpreter() -> Path:
    """Return the Python that runs programs: this process's base interpreter, or the system's if that is unusable."""
    own = Path(os.path.realpath(sys.executable))
    return own if os.access(own, os.X_OK) and not holds_home(own.parent.parent) else Path("/usr/bin/python3")


def holds_home(folder: Path) -> bool:
    """Return True if this user's home is `folder` or lies in it, so that a guest must not see `folder`."""
    return Path(os.path.realpath(os.path.expanduser("~"))).is_relative_to(folder)


def shown(python: Path, toolchains: tuple[Path, ...]) -> list[Path]:
    """Return the host's folders and files that a guest sees."""
    programs = [Path("/", name) for name in _PROGRAMS]
    own = [path for path in (python.parent.parent, *toolchains) if not path.is_relative_to("/usr")]
    of_etc = [*(Path("/etc", name) for name in _OF_ETC), *sorted(Path("/etc").glob(_JAVA))]
    return [path for path in (*programs, *own, *of_etc) if path.exists()]


def command(*, python: Path, toolchains: tuple[Path, ...]) -> list[str]:
    """Return the command that starts a guest; its standard input must be the socket for requests to its server."""
    program = executable()
    assert program is not None, "callers check that bubblewrap is installed"
    mounts = ["--dir", "/etc"]
    for path in shown(python, toolchains):
        if path.is_symlink() and path.parent == Path("/"):
            mounts += ["--symlink", os.readlink(path), str(path)]
            continue
        # Create the parent folders here, since those that bubblewrap creates itself are readable only by root.
        for above in reversed(path.parents[:-1]):
            mounts += ["--dir", str(above)]
        mounts += ["--ro-bind", str(path), str(path)]
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        who = [argument for right in _RIGHTS for argument in ("--cap-add", right)]
    else:
        who = ["--unshare-user"]
    return [
        program, *namespaces, *who, "--die-with-parent", "--new-session", "--hostname", "guest",
        *mounts, "--dir", "/run", "--ro-bind", str(SERVER.parent), _FOLDER_INSIDE, "--proc", "/proc",
        "--tmpfs", "/dev", *(item for name in _DEVICES for item in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin",
        "--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr",
        "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev", "--dir", "/tmp", "--remount-ro", "/",
        "--setenv", *_LINKED_AT_ONCE, "--chdir", "/tmp", str(python), "-I", "-S", f"{_FOLDER_INSIDE}/{SERVER.name}",
    ]  # fmt: skip
