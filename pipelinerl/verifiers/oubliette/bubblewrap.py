"""The default tier's outer wall: the command line by which bubblewrap starts a slot's box around `box/server.py`.

The box shows the host's programs and libraries, read-only, and nothing else of it: no home, no /etc but what linking
and toolchains need, no devices but null, random and urandom (zero, mapped, would be memory that nobody counts), a /proc
and a network of its own. Its own root cannot be written, so that nothing passes from one run to the next.

As root, bubblewrap makes the box without a user namespace and the server keeps the three rights by which each run gets
a user id of its own; as anybody else it makes one, and runs are that user's, in a user namespace below.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

SERVER: Final = Path(__file__).with_name("box") / "server.py"
_FOLDER_INSIDE: Final = "/run/box"
#: The interpreter's libraries are linked before the first run, and not by each run anew.
_LINKED_AT_ONCE: Final = ("LD_BIND_NOW", "1")
#: Of the host's root: where programs and libraries are, links among them as they are.
_PROGRAMS: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Of /etc: how the linker finds libraries, which of several programs is meant, and what Java reads.
_OF_ETC: Final = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
#: Settings without which Java does not start.
_JAVA: Final = "java-*-openjdk"
_DEVICES: Final = ("null", "random", "urandom")
_RIGHTS: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN")


def found() -> str | None:
    """Where bubblewrap is."""
    return shutil.which("bwrap")


def interpreter() -> Path:
    """The Python that runs are run by: this one's own, below its environment, where it can be shown to runs."""
    own = Path(os.path.realpath(sys.executable))
    return own if os.access(own, os.X_OK) else Path("/usr/bin/python3")


def shown(python: Path, toolchains: tuple[Path, ...]) -> list[Path]:
    """Whatever of the host's files a box shows: folders, files, and links of the root."""
    programs = [Path("/", name) for name in _PROGRAMS]
    own = [path for path in (python.parent.parent, *toolchains) if not path.is_relative_to("/usr")]
    of_etc = [*(Path("/etc", name) for name in _OF_ETC), *sorted(Path("/etc").glob(_JAVA))]
    return [path for path in (*programs, *own, *of_etc) if path.exists()]


def command(*, python: Path, toolchains: tuple[Path, ...] = (), extra: tuple[str, ...] = ()) -> list[str]:
    """The whole command; the server's socket is its standard input."""
    program = found()
    assert program is not None, "asked for where bubblewrap has been found"
    shown = ["--dir", "/etc", *(item for name in _PROGRAMS for item in _shown(Path("/", name)))]
    for path in (python.parent.parent, *toolchains):
        if not path.is_relative_to("/usr"):
            for above in reversed(path.parents[:-1]):  # bubblewrap would make them for root alone
                shown += ["--dir", str(above)]
            shown += ["--ro-bind", str(path), str(path)]
    for path in (*(Path("/etc", name) for name in _OF_ETC), *sorted(Path("/etc").glob(_JAVA))):
        if path.exists():
            shown += ["--ro-bind", str(path), str(path)]
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        who = [argument for right in _RIGHTS for argument in ("--cap-add", right)]
    else:
        who = ["--unshare-user"]
    return [
        program, *namespaces, *who, "--die-with-parent", "--new-session", "--hostname", "box",
        *shown, "--dir", "/run", "--ro-bind", str(SERVER.parent), _FOLDER_INSIDE, "--proc", "/proc",
        "--tmpfs", "/dev", *(item for name in _DEVICES for item in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin",
        "--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr",
        "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev", "--dir", "/tmp", *extra, "--remount-ro", "/",
        "--setenv", *_LINKED_AT_ONCE, "--chdir", "/tmp", str(python), "-I", "-S", f"{_FOLDER_INSIDE}/{SERVER.name}",
    ]  # fmt: skip


def _shown(path: Path) -> list[str]:
    """Read-only; where the host has a link, a link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []
