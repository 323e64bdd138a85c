"""Which versions are chosen, where a package is needed, which of its files are allowed; over an index of the test's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from requirements.lock import PLATFORMS, PYTHONS, TARGETS, File, closure, locked, marker, version_of


def file(name: str, sha256: str = "0" * 64) -> File:
    if name.endswith(".whl"):
        _, version, _, tags = parse_wheel_filename(name)
        return File(name, f"there/{name}", version, sha256, tags)
    return File(name, f"there/{name}", Version(name.removesuffix(".tar.gz").rpartition("-")[2]), sha256, None)


@dataclass(frozen=True)
class Shelf:
    """Packages by name: versions with what they need. None of them is installed anywhere."""

    packages: dict[str, dict[str, list[str]]]

    def files(self, name: str) -> list[File]:
        return [file(f"{name.replace('-', '_')}-{version}-py3-none-any.whl") for version in self.packages[name]]

    def requires(self, name: str, version: Version) -> list[Requirement]:
        return [Requirement(text) for text in self.packages[name][str(version)]]


def chosen(shelf: Any, *roots: str, **known: str) -> dict[str, str]:
    return {name: str(version) for name, version in closure(shelf, roots, known).versions.items()}


def test_a_version_is_the_known_one_else_the_newest_that_satisfies_all() -> None:
    shelf = Shelf(
        {
            "qq-root": {"1": ["qq-a", "qq-b"]},
            "qq-a": {"1": [], "2": ["qq-c<3"], "3": ["qq-c"]},
            "qq-b": {"1": ["qq-c<2", "qq-a<3"]},
            "qq-c": {"1.0": [], "1.5": [], "2": [], "3": []},
        }
    )
    assert chosen(shelf, "qq-root==1") == {"qq-root": "1", "qq-a": "2", "qq-b": "1", "qq-c": "1.5"}
    assert chosen(shelf, "qq-root==1", **{"qq-c": "1.0"})["qq-c"] == "1.0"
    assert chosen(shelf, "qq-root==1", **{"qq-c": "3"})["qq-c"] == "1.5", "what is known does not satisfy"
    with pytest.raises(SystemExit, match="nothing of qq-c that satisfies"):
        version_of(shelf, "qq-c", SpecifierSet(">3"), {})  # type: ignore[arg-type]


def test_a_package_is_needed_where_a_marker_says_so_and_with_the_extra_that_brings_it() -> None:
    shelf = Shelf(
        {
            "qq-root": {"1": ['qq-a; sys_platform == "linux"', "qq-b[more]", 'qq-e; python_full_version < "3.11.3"']},
            "qq-a": {"1": ['qq-d; platform_machine == "x86_64"']},
            "qq-b": {"1": ['qq-c; extra == "more"', 'qq-never; extra == "other"']},
            "qq-c": {"1": []},
            "qq-d": {"1": []},
            "qq-e": {"1": []},
        }
    )
    found = closure(shelf, ["qq-root==1"], {})  # type: ignore[arg-type]
    assert {name: marker(targets) for name, targets in found.needed_in.items()} == {
        "qq-root": "", "qq-b": "", "qq-c": "", "qq-a": 'sys_platform == "linux"',
        "qq-d": 'platform_machine == "x86_64"', "qq-e": 'python_version == "3.11"',
    }  # fmt: skip
    without = closure(shelf, ["qq-root==1"], {}, everywhere_of="qq-root")  # type: ignore[arg-type]
    assert without.versions.keys() == {"qq-root", "qq-b", "qq-c"}


def test_a_marker_is_written_for_what_is_needed_and_for_nothing_that_cannot_be_said() -> None:
    assert marker(TARGETS) == ""
    two = [(python, PLATFORMS[0]) for python in PYTHONS[1:]]
    assert marker(two) == '(python_version == "3.12" or python_version == "3.13") and platform_machine == "x86_64"'
    with pytest.raises(SystemExit, match="no marker"):
        marker([(PYTHONS[0], PLATFORMS[0]), (PYTHONS[1], PLATFORMS[1])])


ALLOWED = [
    "thing-1-py3-none-any.whl", "thing-1-py2.py3-none-any.whl", "thing-1.tar.gz",
    "thing-1-cp311-cp311-manylinux_2_28_x86_64.whl", "thing-1-cp313-cp313-manylinux2014_aarch64.whl",
    "thing-1-cp312-cp312-macosx_11_0_arm64.whl", "thing-1-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "thing-1-py3-none-manylinux_2_28_x86_64.whl", "thing-1-py3-none-macosx_14_0_universal2.whl",
]  # fmt: skip
REFUSED = [
    "thing-2-py3-none-any.whl", "thing-1-py2-none-any.whl", "thing-1-cp310-cp310-manylinux_2_28_x86_64.whl",
    "thing-1-cp314-cp314-manylinux_2_28_x86_64.whl", "thing-1-cp313-cp313t-manylinux_2_28_x86_64.whl",
    "thing-1-cp311-cp311-win_amd64.whl", "thing-1-cp311-cp311-musllinux_1_2_x86_64.whl",
    "thing-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", "thing-1-cp314-abi3-manylinux_2_28_x86_64.whl",
]  # fmt: skip


def test_files_are_those_that_a_supported_environment_can_use() -> None:
    class Files:
        def files(self, name: str) -> list[File]:
            return [file(each, sha256=each) for each in [*ALLOWED, *REFUSED]]

    assert locked(Files(), "thing", "1").hashes == tuple(sorted(ALLOWED))  # type: ignore[arg-type]
