"""Toolchains: commands that compile and run programs in each language, and detection of installed languages.

A compiled program is a single file, which the compiling run writes to standard output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from pipelinerl.errors import UserError
from pipelinerl.plugins.oubliette.bubblewrap import holds_home
from pipelinerl.plugins.oubliette.runs import Limits, Run

#: The run's folder in the guest.
_FOLDER: Final = "/tmp"


class ToolchainMissing(UserError):
    """A language is unknown, or its tools are not installed on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Names and commands of one language.

    Attributes:
        aliases: other names of the language in fenced blocks and data sets.
        tools: programs that must be installed on the host.
        source: the source file's name.
        compile: a shell line that writes `program`; if empty, the source is the program.
        program: the program file's name.
        argv: command that runs the program; if empty, the guest's warm Python runs it.
        reserves_addresses: whether the language's runtime reserves far more address space than it uses.
    """

    name: str
    aliases: tuple[str, ...]
    tools: tuple[str, ...]
    source: str
    compile: str = ""
    program: str
    argv: tuple[str, ...] = ()
    reserves_addresses: bool = False

    def compiling(self, source: str, limits: Limits) -> Run | None:
        """Return the run that prints the compiled program, or None if the language needs no compiling."""
        if not self.compile:
            return None
        script = f"{{ {self.compile}; }} >&2 && cat {self.program}"
        return Run(argv=("/bin/sh", "-c", script), files=((self.source, source.encode()),), limits=limits)

    def running(self, program: bytes, stdin: bytes, limits: Limits) -> Run:
        if self.reserves_addresses:
            limits = replace(limits, address_space=False)
        files = ((self.program, program),)
        if not self.argv:
            return Run(python=f"{_FOLDER}/{self.program}", files=files, stdin=stdin, limits=limits)
        return Run(argv=self.argv, files=files, stdin=stdin, limits=limits)


#: Limits of compiling, which are higher than those of programs but still stop template bombs.
COMPILING: Final = Limits(
    cpu_s=30.0, wall_s=60.0, memory_bytes=1 << 30, address_space=False, output_bytes=64 << 20, disk_bytes=256 << 20
)

_BINARY: Final = (f"{_FOLDER}/program",)

LANGUAGES: Final[Mapping[str, Toolchain]] = {
    language.name: language
    for language in (
        Toolchain(
            name="python", aliases=("py", "python3", "py3", "pypy", "pypy3"), tools=(),
            source="main.py", program="main.py",
        ),
        Toolchain(
            name="cpp", aliases=("c++", "cc", "cxx", "c++17", "c++20", "g++"), tools=("g++",),
            source="main.cpp", compile="g++ -O2 -std=c++17 -o program main.cpp", program="program", argv=_BINARY,
        ),
        Toolchain(
            name="c", aliases=("gcc",), tools=("gcc",),
            source="main.c", compile="gcc -O2 -std=c17 -o program main.c -lm", program="program", argv=_BINARY,
        ),
        Toolchain(
            name="rust", aliases=("rs",), tools=("rustc",),
            source="main.rs", compile="rustc --edition 2021 -O -o program main.rs", program="program", argv=_BINARY,
        ),
        Toolchain(
            name="go", aliases=("golang",), tools=("go",), source="main.go",
            compile="GOCACHE=/tmp/cache GOFLAGS=-p=2 go build -o program main.go", program="program", argv=_BINARY,
            reserves_addresses=True,
        ),
        Toolchain(
            name="javascript", aliases=("js", "node", "nodejs"), tools=("node",),
            source="main.js", program="main.js", argv=("node", f"{_FOLDER}/main.js"), reserves_addresses=True,
        ),
        Toolchain(
            name="java", aliases=("java17",), tools=("javac", "java", "jar"), source="Main.java",
            compile="javac -d classes Main.java && jar cfe program.jar Main -C classes .", program="program.jar",
            argv=("java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{_FOLDER}/program.jar", "Main"),
            reserves_addresses=True,
        ),
    )
}  # fmt: skip

_BY_ALIAS: Final = {alias: each for each in LANGUAGES.values() for alias in (each.name, *each.aliases)}


def named(name: str) -> Toolchain | None:
    """Return the language with this name or alias, or None."""
    return _BY_ALIAS.get(name.strip().lower())


def find(name: str) -> Toolchain:
    """Return the language with this name or alias, with the paths of its tools. Raises `ToolchainMissing`."""
    language = named(name)
    if language is None:
        raise ToolchainMissing(f"language must be one of {', '.join(LANGUAGES)}, got {name!r}")
    places = {tool: _place(tool) for tool in language.tools}
    if missing := [tool for tool, place in places.items() if place is None]:
        raise ToolchainMissing(
            f"{language.name} needs {', '.join(missing)}, which is not installed on this host outside ~/bin"
        )
    path = ":".join(sorted({str(place.parent) for place in places.values() if place is not None}))
    compiling = f"export PATH={path}:$PATH; {language.compile}" if language.compile else ""
    argv = language.argv
    if argv and "/" not in argv[0]:
        argv = (str(_place(argv[0])), *argv[1:])
    return replace(language, compile=compiling, argv=argv)


def installed() -> tuple[str, ...]:
    """Return the names of the languages installed on this host."""
    return tuple(name for name, each in LANGUAGES.items() if all(_place(tool) is not None for tool in each.tools))


def folders() -> tuple[Path, ...]:
    """Return the folders outside /usr that a guest must see for the installed languages."""
    places = (_place(tool) for each in LANGUAGES.values() for tool in each.tools)
    folders = {place.parent.parent for place in places if place is not None and not place.is_relative_to("/usr")}
    return tuple(sorted(folders))


@cache
def _place(tool: str) -> Path | None:
    """Return the path of an installed tool, with links resolved if its real file is outside /usr.

    Return None for a tool that guests could not or must not see: its real file is neither in /usr nor in a folder named
    `bin`, or that folder lies directly in a home.
    """
    path = shutil.which(tool, path="/usr/local/bin:/usr/bin:/bin") or shutil.which(tool)
    if path is None:
        return None
    real = Path(os.path.realpath(path))
    if real.name == "rustup":  # rustup only starts the selected toolchain's compiler; find the compiler
        try:
            found = subprocess.run([path, "--print", "sysroot"], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        place = Path(found.stdout.strip(), "bin", tool)
        return place if place.exists() else None
    if real.is_relative_to("/usr"):
        return Path(path)
    return real if real.parent.name == "bin" and not holds_home(real.parent.parent) else None
