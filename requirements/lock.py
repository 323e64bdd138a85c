"""`make lock`: writes the layers beside this file, from pyproject.toml and `constraints*.txt` and pip's own index.

A version is, in this order: the one that pyproject.toml or a constraints file pins, the one that is locked already, the
one that is installed here, the newest that satisfies. Of each version those files are allowed that CPython 3.11 to 3.13
on Linux (x86_64, aarch64; glibc) and macOS can use, and the source. Requirements that pyproject.toml names lead to the
others by what the packages themselves declare, for each of these environments; so a package may carry a marker. The
`constraints-*.txt` of vLLM are taken as they stand, without what they would bring.

The index is asked through pip's own finder, so that its address and what it is given stay pip's: nothing here names a
host. That is no public interface of pip's; this runs when a version changes, on the machine of who changes it.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from requirements.install import (
    EXTRAS,
    ROOT,
    TORCH,
    Locked,
    asked,
    canonical,
    digest,
    folders as own_folders,
    layer,
    own_files,
    pins,
)

_HEADING = "# Written by `make lock`: what is installed, and the hashes of the files that may be.\n"
PYTHONS = ((3, 11), (3, 12), (3, 13))
#: The first release of each Python, and one after all that a marker may name.
PATCHES = (0, 99)
#: `sys_platform`, `platform_system`, `platform_machine`.
PLATFORMS = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
Target = tuple[tuple[int, int], tuple[str, str, str]]
TARGETS: tuple[Target, ...] = tuple(itertools.product(PYTHONS, PLATFORMS))


@dataclass(frozen=True)
class File:
    """One file of a package on the index."""

    name: str
    url: str
    version: Version
    sha256: str
    tags: frozenset[Tag] | None
    """None: a source archive."""


class Index:
    """pip's index, asked once for each package."""

    def __init__(self, finder: Any, session: Any) -> None:
        self._finder, self._session = finder, session
        self._files: dict[str, list[File]] = {}

    def files(self, name: str) -> list[File]:
        """What the index has of a package and has not taken back."""
        if name not in self._files:
            print(f"lock: {name}", file=sys.stderr)
            self._files[name] = list(self._asked(name))
        return self._files[name]

    def requires(self, name: str, version: Version) -> list[Requirement]:
        """What a version declares, read from what is installed here, else from a wheel's end."""
        from pip._internal.network.lazy_wheel import dist_from_wheel_url

        try:
            if Version((installed := distribution(name)).version) == version:
                return [Requirement(text) for text in installed.requires or ()]
        except PackageNotFoundError:
            pass
        wheels = [file for file in self.files(name) if file.version == version and file.tags is not None]
        if not wheels:
            raise SystemExit(f"lock: {name} {version} has no wheel to tell what it needs: install it here first")
        wheel = next((file for file in wheels if _usable(file) and "linux" in file.name), wheels[0])
        metadata = dist_from_wheel_url(name, wheel.url, self._session).metadata
        return [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]

    def _asked(self, name: str) -> Iterator[File]:
        from pip._internal.index.collector import parse_links
        from pip._internal.models.link import Link

        for location in self._finder.search_scope.get_index_urls_locations(name):
            page = self._finder._link_collector.fetch_response(Link(location))
            for link in parse_links(page) if page else ():
                read = _read(link.filename)
                if read and link.yanked_reason is None and link.hash and link.hash_name == "sha256":
                    version, tags = read
                    yield File(link.filename, link.url_without_fragment, version, link.hash, tags)


@contextmanager
def pip_index() -> Iterator[tuple[Index, list[Path]]]:
    """The index that pip is configured to ask, and the folders of this machine that it looks into."""
    from pip._internal.commands import create_command

    command: Any = create_command("install")
    options, _ = command.parse_args([])
    with command.main_context():
        session = command.get_default_session(options)
        places = own_folders("\n".join(f"find-links='{place}'" for place in options.find_links))
        yield Index(command._build_package_finder(options, session), session), places


def _read(filename: str) -> tuple[Version, frozenset[Tag] | None] | None:
    try:
        if filename.endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(filename)
            return version, tags
        return parse_sdist_filename(filename)[1], None
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _usable(file: File) -> bool:
    """Whether one of the environments can use it; source archives are for whichever has no wheel."""
    return file.tags is None or any(_suits(tag) for tag in file.tags)


def _suits(tag: Tag) -> bool:
    stable = tag.abi == "abi3" and tag.interpreter.startswith("cp3") and int(tag.interpreter[3:] or 0) <= 13
    own = tag.interpreter in ("cp311", "cp312", "cp313") and tag.abi in ("none", tag.interpreter)
    pure = tag.interpreter in ("py3", "py311", "py312", "py313") and tag.abi == "none"
    linux = tag.platform.startswith(("manylinux", "linux_")) and tag.platform.endswith(("x86_64", "aarch64"))
    return (stable or own or pure) and (linux or tag.platform == "any" or tag.platform.startswith("macosx"))


# --- which packages, at which version, where --------------------------------------------------------------------------


def _environment(target: Target, extra: str, patch: int) -> dict[str, str]:
    (major, minor), (platform, system, machine) = target
    return {
        "python_version": f"{major}.{minor}", "python_full_version": f"{major}.{minor}.{patch}", "extra": extra,
        "sys_platform": platform, "platform_system": system, "platform_machine": machine, "os_name": "posix",
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
        "implementation_version": f"{major}.{minor}.{patch}", "platform_release": "", "platform_version": "",
    }  # fmt: skip


@dataclass(frozen=True)
class Packages:
    """What requirements lead to: each package's version, and the environments that need it."""

    versions: dict[str, Version]
    needed_in: dict[str, frozenset[Target]]


def closure(index: Index, roots: Sequence[str], known: dict[str, str], *, everywhere_of: str = "") -> Packages:
    """What these requirements lead to. Of `everywhere_of` only those count that all environments have.

    A version that is chosen too early for what is found later is chosen anew, with that in mind.
    """
    asked_for: dict[str, SpecifierSet] = {}
    while True:
        versions: dict[str, Version] = {}
        seen: defaultdict[tuple[str, str], frozenset[Target]] = defaultdict(frozenset)
        waiting: list[tuple[Requirement, frozenset[Target]]] = [
            (Requirement(root), frozenset(TARGETS)) for root in roots
        ]
        while waiting:
            requirement, targets = waiting.pop()
            name = canonical(requirement.name)
            asked_for[name] = asked_for.get(name, SpecifierSet()) & requirement.specifier
            if name not in versions:
                versions[name] = version_of(index, name, asked_for[name], known)
            elif not asked_for[name].contains(versions[name], prereleases=True):
                break
            for extra in ("", *requirement.extras):
                if targets <= seen[name, extra]:
                    continue
                seen[name, extra] |= targets
                for needed in index.requires(name, versions[name]):
                    there = frozenset(each for each in targets if _applies(needed, each, extra))
                    if there and not (name == everywhere_of and there != targets):
                        waiting.append((needed, there))
        else:
            return Packages(versions, {name: seen[name, ""] for name in versions})


def _applies(needed: Requirement, target: Target, extra: str) -> bool:
    """Whether any release of that Python needs it: what only early ones need is installed with the later ones, too."""
    if needed.marker is None:
        return not extra
    for patch in PATCHES:
        with_extra = needed.marker.evaluate(_environment(target, extra, patch))
        if with_extra and (not extra or not needed.marker.evaluate(_environment(target, "", patch))):
            return True
    return False


def version_of(index: Index, name: str, wanted: SpecifierSet, known: dict[str, str]) -> Version:
    """The pinned, locked or installed version where there is one that satisfies, else the newest."""
    candidates = [known[name]] if name in known else []
    with suppress(PackageNotFoundError):
        candidates.append(distribution(name).version.partition("+")[0])
    candidates += map(str, sorted({file.version for file in index.files(name) if wanted.contains(file.version)})[-1:])
    for candidate in candidates:
        if wanted.contains(candidate, prereleases=True):
            return Version(candidate)
    raise SystemExit(f"lock: the index has nothing of {name} that satisfies {wanted}")


def marker(targets: Collection[Target]) -> str:
    """A marker that is true in these environments alone."""
    pythons, platforms = {python for python, _ in targets}, {platform for _, platform in targets}
    if len(targets) != len(pythons) * len(platforms):
        raise SystemExit(f"lock: no marker is written for {sorted(targets)}: say in lock.py how")
    parts = []
    if pythons != set(PYTHONS):
        parts.append(" or ".join(f'python_version == "{major}.{minor}"' for major, minor in sorted(pythons)))
    if platforms != set(PLATFORMS):
        systems = {each[0] for each in platforms}
        whole = platforms == {each for each in PLATFORMS if each[0] in systems}
        named = sorted({f'sys_platform == "{each[0]}"' if whole else f'platform_machine == "{each[2]}"'
                        for each in platforms})  # fmt: skip
        parts.append(" or ".join(named))
    return " and ".join(f"({part})" if " or " in part else part for part in parts)


# --- layers -----------------------------------------------------------------------------------------------------------


def locked(index: Index, name: str, version: str, needed_in: Collection[Target] = TARGETS) -> Locked:
    """A package with the hashes of those of its files that the environments can use."""
    hashes = sorted({file.sha256 for file in index.files(name) if file.version == Version(version) and _usable(file)})
    if not hashes:
        raise SystemExit(f"lock: the index has no usable file of {name} {version}")
    return Locked(name, version, marker(needed_in), tuple(hashes))


def cpu_torch(version: str, places: Iterable[Path]) -> dict[str, Locked]:
    """torch's CPU builds of that version: those known already, and those in folders of this machine."""
    before = layer("torch-cpu").get(TORCH)
    hashes = set(before.hashes) if before and before.version.partition("+")[0] == version else set()
    hashes |= {digest(path) for name, build, path in own_files(places) if (name, build) == (TORCH, f"{version}+cpu")}
    return {TORCH: Locked(TORCH, f"{version}+cpu", "", tuple(sorted(hashes)))} if hashes else {}


def layers(index: Index, places: Iterable[Path]) -> Iterator[tuple[str, dict[str, Locked]]]:
    """Every file with what belongs into it."""
    names = ["build", TORCH, *EXTRAS]
    known = {name: each.version for file in names for name, each in layer(file).items()}
    known |= pins((ROOT / "constraints.txt").read_text().splitlines())
    written: set[str] = set()
    for file, extras in EXTRAS.items():
        roots = asked(extras)
        known |= pins(roots)
        packages, without = closure(index, roots, known), closure(index, roots, known, everywhere_of=TORCH)
        found = {name: locked(index, name, str(version), packages.needed_in[name])
                 for name, version in sorted(packages.versions.items()) if name not in written}  # fmt: skip
        written |= found.keys()
        if file == "main":
            build = pins(asked(())).keys() & {"setuptools"}
            cuda = found.keys() - without.versions.keys() | {TORCH}
            yield "build", {name: found.pop(name) for name in sorted(build)}
            yield TORCH, {name: found.pop(name) for name in sorted(cuda)}
            yield "torch-cpu", cpu_torch(str(packages.versions[TORCH]), places)
        yield file, found
    for path in sorted(ROOT.glob("constraints-*.txt")):
        wanted = pins(path.read_text().splitlines())
        yield (
            path.stem.removeprefix("constraints-"),
            {name: locked(index, name, version) for name, version in sorted(wanted.items())},
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every layer."""
    with pip_index() as (index, places):
        for name, packages in layers(index, places):
            text = "\n".join([_HEADING, *map(str, packages.values())]) + "\n"
            (ROOT / "requirements" / f"{name}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
