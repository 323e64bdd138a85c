"""The lock files in `requirements/` satisfy pyproject.toml, are complete, and contain hashes but no index address."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(*files):
    """Return a dict from package name to the version that these lock files pin."""
    pins = {}
    for file in files:
        text = (ROOT / "requirements" / f"{file}.txt").read_text()
        pins |= {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}
    return pins


def with_extra(extra):
    """Return the project's requirements with one optional extra, including extras that this extra itself requires."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"]]
    waiting = [extra] if extra else []
    for each in waiting:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][each]):
            if requirement.name == PROJECT["name"]:
                waiting += sorted(requirement.extras)
            else:
                requirements.append(requirement)
    return requirements


@pytest.mark.parametrize(("file", "extra"), [("main", "standard"), ("dev", "dev"), ("bench", "bench")])
def test_versions_in_the_lock_file_satisfy_the_requirements_in_pyproject(file, extra):
    pins = locked("torch", file)
    for requirement in with_extra(extra):
        version = pins.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version, prereleases=True), f"{requirement}: run `make lock`"


def test_pyproject_requires_no_exact_version_of_a_package():
    every = with_extra("") + [each for extra in PROJECT["optional-dependencies"] for each in with_extra(extra)]
    pinned = [each for each in every if re.search(r"==(?!.*\*)", str(each.specifier))]
    assert not pinned, "a neighbour may need another version"


@pytest.mark.parametrize("file", [path.stem for path in (ROOT / "requirements").glob("*.in")])
def test_requirements_list_matches_its_lock_file(file):
    lines = (ROOT / "requirements" / f"{file}.in").read_text().splitlines()
    wanted = {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, (x for x in lines if x[0] != "#"))}
    assert wanted == {name: f"=={version}" for name, version in locked(file).items()}, "run `make lock`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lock_file_has_hashes_and_names_no_package_index(path):
    text = path.read_text()
    packages = [block for block in re.split(r"^(?=[\w])", text, flags=re.MULTILINE) if "==" in block]
    assert packages and all("--hash=sha256:" in block for block in packages)
    assert "://" not in text and "--index" not in text


def test_lock_file_has_every_dependency_of_its_packages():
    """pip installs lock files without resolving dependencies, so that a missing one would only be noticed on import."""
    pins = locked("build", "torch", "torch-cuda", "bench")
    checked = 0
    for name, version in pins.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # not installed, because its lock file is for another environment
        if installed.version.partition("+")[0] != version:
            continue
        for needed in map(Requirement, installed.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                there = pins.get(canonicalize_name(needed.name))
                assert there and needed.specifier.contains(there, prereleases=True), f"{name} needs {needed}"
        checked += 1
    assert checked > 80
