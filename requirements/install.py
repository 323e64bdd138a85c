"""`python -m requirements.install main dev`: installs layers, each file verified by its hash, and nothing else.

A layer is a file beside this one, written by `requirements.lock`: versions with the hashes of their files, no host. pip
resolves nothing here, so that no dependency comes in unseen, and builds with the setuptools that is locked.

Trusted besides is what lies in a folder of this machine that pip was told to look into (`find-links`): whoever wrote it
there could have changed this file as well. It is taken with a line that says so; torch's CPU build, which the index
does not have, comes that way. Of a URL nothing is taken that the layers do not know. Needs Python and its pip alone.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
#: What each environment of the Makefile takes from pyproject.toml; a later layer holds what the earlier ones lack.
EXTRAS: Mapping[str, tuple[str, ...]] = {"main": (), "dev": ("dev",), "bench": ("bench",)}
#: What only the index's torch needs, and what this machine's CPU build takes the place of.
TORCH = "torch"
_PIN = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*==\s*([^\s;,]+)")


@dataclass(frozen=True)
class Locked:
    """One package: its version, in which environments it is needed (a marker or ""), and its files' hashes."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        first = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n    ".join([first, *(f"--hash=sha256:{each}" for each in self.hashes)])


def canonical(name: str) -> str:
    """How the index spells a name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def layer(name: str, root: Path = ROOT) -> dict[str, Locked]:
    """The packages of a layer by name; none where there is no such file."""
    path = root / "requirements" / f"{name}.txt"
    lines = path.read_text().replace("\\\n", " ").splitlines() if path.exists() else []
    return {each.name: each for each in map(_parsed, lines) if each}


def _parsed(line: str) -> Locked | None:
    text = line.partition("#")[0]
    if not (pin := _PIN.match(text)):
        return None
    words, *hashes = re.split(r"\s+--hash=sha256:", text.rstrip())
    return Locked(canonical(pin[1]), pin[3], words.partition(";")[2].strip(), tuple(hashes))


def pins(lines: Iterable[str]) -> dict[str, str]:
    """The versions that requirements name exactly."""
    return {canonical(pin[1]): pin[3] for line in lines if (pin := _PIN.match(line.strip()))}


def asked(extras: Sequence[str], root: Path = ROOT) -> list[str]:
    """The requirements in pyproject.toml of the project with these extras, those that extras name included."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    own, optional = project["project"]["name"], project["project"].get("optional-dependencies", {})
    found = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    waiting = list(extras)
    for extra in waiting:
        for requirement in optional[extra]:
            inner = re.fullmatch(rf"{own}\[([^]]*)\]", requirement)
            if inner:
                waiting += [each for each in re.split(r"\s*,\s*", inner[1]) if each not in waiting]
            else:
                found.append(requirement)
    return found


def stale(root: Path = ROOT) -> Iterator[str]:
    """Where the layers and what they were made from say different things."""
    locked = layer("build", root) | layer(TORCH, root)
    for name, extras in EXTRAS.items():
        locked |= layer(name, root)
        for package, version in pins(asked(extras, root)).items():
            there = locked[package].version if package in locked else "nothing"
            if there != version:
                yield f"pyproject.toml asks for {package} {version}, requirements/{name}.txt has {there}"
    for path in sorted(root.glob("constraints-*.txt")):
        name = path.stem.removeprefix("constraints-")
        wanted, held = pins(path.read_text().splitlines()), {k: v.version for k, v in layer(name, root).items()}
        yield from (
            f"{path.name} has {package} {wanted.get(package)}, requirements/{name}.txt {held.get(package)}"
            for package in sorted(wanted.keys() | held.keys())
            if wanted.get(package) != held.get(package)
        )


# --- files of this machine's own --------------------------------------------------------------------------------------


def folders(configured: str) -> list[Path]:
    """The folders among pip's `find-links`, as `pip config list` prints them; addresses are none."""
    found = []
    for values in re.findall(r"find-links='(.*)'$", configured, flags=re.MULTILINE):
        for word in values.replace("\\n", " ").split():
            path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
            if path.is_dir() and path not in found:
                found.append(path)
    return found


def own_files(places: Iterable[Path]) -> Iterator[tuple[str, str, Path]]:
    """Name, version and path of each file in these folders that this interpreter can install."""
    from pip._vendor.packaging import utils
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.version import InvalidVersion

    tags = frozenset(sys_tags())
    for path in sorted(file for place in places for file in place.iterdir()):
        try:
            if path.suffix == ".whl":
                name, version, _, for_tags = utils.parse_wheel_filename(path.name)
                if tags.isdisjoint(for_tags):
                    continue
            else:
                name, version = utils.parse_sdist_filename(path.name)
        except (utils.InvalidWheelFilename, utils.InvalidSdistFilename, InvalidVersion):
            continue
        yield name, str(version), path


def with_own(wanted: dict[str, Locked], files: Iterable[tuple[str, str, Path]]) -> tuple[dict[str, Locked], list[str]]:
    """The packages, this machine's files of the same versions allowed as well; and what is to be said of these."""
    found, notes = dict(wanted), []
    for name, version, path in files:
        package = found.get(name)
        if package and package.version == version and (own := digest(path)) not in package.hashes:
            found[name] = replace(package, hashes=(*package.hashes, own))
            notes.append(f"{path} is not in requirements/: allowed since it lies on this machine; sha256 {own}")
    return found, notes


def cpu_build(version: str, files: Iterable[tuple[str, str, Path]]) -> str | None:
    """The version of this machine's own CPU build of torch, where there is one."""
    builds = (found for name, found, _ in files if name == TORCH and found.partition("+")[::2] == (version, "cpu"))
    return next(builds, None)


def digest(path: Path) -> str:
    """A file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- installation -----------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str], files: Sequence[tuple[str, str, Path]], root: Path = ROOT) -> dict[str, Locked]:
    """The packages of these layers; torch's with the first, by this machine's own CPU build or the index's."""
    packages: dict[str, Locked] = {}
    for name in names:
        packages |= layer(name, root)
    if "main" in names:
        torch = layer(TORCH, root)
        version = cpu_build(torch[TORCH].version, files) if torch else None
        known = layer("torch-cpu", root).get(TORCH)
        if version:
            torch = {TORCH: Locked(TORCH, version, "", known.hashes if known and known.version == version else ())}
        packages |= torch
    return packages


def _pip(python: str, *words: str) -> list[str]:
    other = [] if python == sys.executable else ["--python", python]
    return [sys.executable, "-m", "pip", *other, *words]


def _install(python: str, packages: Mapping[str, Locked]) -> bool:
    """Whether pip found a file whose hash is allowed for each, and installed it; its words go where they always go."""
    with tempfile.NamedTemporaryFile("w", prefix="locked-", suffix=".txt") as file:
        file.write("\n".join(map(str, packages.values())) + "\n")
        file.flush()
        flags = ["--disable-pip-version-check", "--require-hashes", "--no-deps", "--no-build-isolation"]
        command = _pip(python, "install", *flags, "--requirement", file.name)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:
            assert pip.stderr is not None
            said = []
            for line in pip.stderr:
                sys.stderr.write(line)
                said.append(line)
    if pip.returncode and any("HASHES" in line or "--hash" in line for line in said):
        print(
            "make: a file that the package index offers is not the one that requirements/ names, and nothing of it was "
            "installed. If a version was changed on purpose: make lock. If not, do not trust that index",
            file=sys.stderr,
        )
    return pip.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; the status is 1 where something is not as locked."""
    parser = argparse.ArgumentParser(prog="requirements.install", description=__doc__)
    parser.add_argument("layers", nargs="+")
    parser.add_argument("--into", default=sys.executable, help="the environment's interpreter")
    parser.add_argument("--stale", action="store_true", help="as locked, whatever is asked for by now")
    given = parser.parse_args(arguments)
    if not given.stale and (differences := list(stale())):
        print("\n".join([f"make: {each}" for each in differences] + ["make: run `make lock`"]), file=sys.stderr)
        return 1
    configured = subprocess.run(_pip(given.into, "config", "list"), capture_output=True, text=True, check=True).stdout
    files = list(own_files(folders(configured)))
    packages, notes = with_own(chosen(given.layers, files), files)
    print("".join(f"make: {note}\n" for note in notes), file=sys.stderr, end="")
    first = layer("build") if "main" in given.layers else {}
    return 0 if all(_install(given.into, each) for each in (first, packages) if each) else 1


if __name__ == "__main__":
    sys.exit(main())
