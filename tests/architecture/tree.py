"""The project's modules, each parsed once, with its imports, its room (package) and its floor (layer)."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("inference_contract", "trainer_contract", "pipelinerl", "launch", "benchmarks")

#: The floor of each room: a room may import only lower floors (DESIGN section 3). A room is a top-level package, or a
#: module directly below `pipelinerl/`.
FLOORS: dict[str, float] = {
    "inference_contract": 0,
    "trainer_contract": 0,
    "values": 1,
    "observability": 1,
    "answers": 2,
    "system": 2,
    "objective": 2,
    "numerics": 2,
    "component": 2.4,
    "registry": 2.5,
    "sections": 2.6,
    "data": 3,
    "streams": 3,
    "verifiers": 3,
    "models": 3,
    "weights": 3,
    "engines": 4,
    "trainers": 4,
    "actor": 5,
    "training": 5,
    "controller": 6,
    "config": 7,
    "roles": 7.25,
    "commands": 7.5,
    "plugins": 7.6,
    "cli": 7.75,
    "launch": 8,
    "benchmarks": 9,
}
VALUES = frozenset({"types", "enums", "arrays", "staleness", "rng", "errors", "messages", "section"})

#: Modules of `config` that stand below the rooms that they configure, so that these take a section as it is.
SECTIONS = ("pipelinerl.config.sections", "pipelinerl.config.learning", "pipelinerl.config.evaluation")


@dataclass(frozen=True)
class Module:
    """One source file. `path` is relative to the repository, in POSIX form."""

    path: str
    source: str

    @property
    def name(self):
        """The module's dotted name; for an `__init__`, the name of the package."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def stem(self):
        """The file name without its suffix."""
        return Path(self.path).stem

    @property
    def tree(self):
        """The syntax tree."""
        return _parsed(self.source)

    @property
    def imports(self):
        """Absolute dotted names that are imported anywhere in the file; `from a import b` gives `a.b`."""
        return tuple(sorted(set(_imported(self.tree))))


@cache
def _parsed(source):
    return ast.parse(source)


def _imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by absolute name, not relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(dotted):
    """Return the room of a dotted name; None for third parties and for the bare package `pipelinerl`."""
    parts = dotted.split(".")
    if parts[0] in ("inference_contract", "trainer_contract", "launch", "benchmarks"):
        return parts[0]
    if parts[0] != "pipelinerl" or len(parts) == 1:
        return None
    if dotted.startswith(SECTIONS):
        return "sections"
    if parts[1] in VALUES:
        return "values"
    if parts[1] == "__main__":
        return "cli"
    return parts[1] if parts[1] in FLOORS else None


@cache
def project():
    """Return every module of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


@cache
def suite():
    """Return every module below `tests/`."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return tuple(Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)
