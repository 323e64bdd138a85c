"""What is installed is what `requirements/` names, to the byte; what this machine's owner laid there is taken aloud."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from requirements.install import EXTRAS, ROOT, TORCH, canonical, chosen, cpu_build, folders, layer, stale
from tests.patience import PATIENCE_S

FILES = sorted((ROOT / "requirements").glob("*.txt"))


# --- the files that are committed -------------------------------------------------------------------------------------


def test_the_layers_say_what_they_were_made_from() -> None:
    """A version that was changed without them: `make lock`."""
    assert list(stale()) == []


def copied(tmp_path: Path) -> Path:
    """What decides whether the layers are stale, to be changed."""
    for name in ("pyproject.toml", "constraints-vllm.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("pyproject.toml", "ruff==", "ruff==9", "ruff"),
        ("pyproject.toml", '"httpx==', '"newcomer==1",\n    "httpx==', "newcomer 1, requirements/main.txt has nothing"),
        ("pyproject.toml", '"setuptools==', '"setuptools==9', "setuptools"),
        ("constraints-vllm.txt", "astor==", "astor==9", "astor"),
        ("constraints-vllm.txt", "astor==", "newcomer==1\nastor==", "newcomer"),
        ("requirements/main.txt", "\nhttpx==", "\nhttpx==9", "httpx"),
        ("requirements/torch.txt", "\ntorch==", "\ntorch==9", "torch"),
    ],
)
def test_a_stale_layer_is_found(tmp_path: Path, file: str, before: str, after: str, named: str) -> None:
    changed = copied(tmp_path) / file
    text = changed.read_text()
    assert before in text
    changed.write_text(text.replace(before, after, 1))
    assert any(named in sentence for sentence in stale(tmp_path))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_layer_names_hashes_and_no_host(file: Path) -> None:
    packages = layer(file.stem)
    assert packages and "://" not in file.read_text() and "--index" not in file.read_text()
    assert all(
        each.hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in each.hashes) for each in packages.values()
    )
    written = "".join(f"{each}\n" for each in packages.values())
    assert file.read_text().partition("\n\n")[2] == written, "it is read as it was written"


def test_nothing_that_a_locked_package_needs_is_missing() -> None:
    """pip resolves nothing: what the layers lack would be missing at the first import."""
    locked = {name: package for each in ("build", TORCH, *EXTRAS) for name, package in layer(each).items()}
    looked_at = 0
    for name, package in locked.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # of an environment that is not this one
        if installed.version.partition("+")[0] != package.version:
            continue
        for needed in map(Requirement, installed.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                there = locked.get(canonical(needed.name))
                assert there and needed.specifier.contains(there.version, prereleases=True), f"{name} needs {needed}"
        looked_at += 1
    assert looked_at > 80


# --- an installation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A project of one dependency, an environment for it, an index, and a folder of this machine's own."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "environment" / "bin" / "python"

    def installed(self) -> bool:
        return any((self.path / "environment").glob("lib/*/site-packages/thing*"))

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "requirements.install", "main", "--into", str(self.python)]
        settings = {"PIP_INDEX_URL": f"{(self.path / 'index').as_uri()}", "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run(
            words, cwd=self.path, env={"PATH": os.environ["PATH"], "HOME": str(self.path), **settings, **environment},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip


def wheel(folder: Path, content: str) -> tuple[Path, str]:
    """A wheel of `thing` 1.0, and its sha256."""
    about = "thing-1.0.dist-info"
    files = {
        "thing.py": content,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={sums[name]},{len(text)}\n" for name, text in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """The index offers a wheel; no layer names its hash yet."""
    made = Place(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    (tmp_path / "requirements").mkdir()
    for name in ("__init__.py", "install.py"):
        shutil.copy(ROOT / "requirements" / name, tmp_path / "requirements" / name)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\n[project]\nname = "project"\ndependencies = ["thing==1.0"]\n'
        "[project.optional-dependencies]\ndev = []\nbench = []\n"
    )
    _, offered = wheel(tmp_path / "files", "SERVED = 'by the index'\n")
    page = tmp_path / "index" / "thing" / "index.html"
    page.parent.mkdir(parents=True)
    link = f"../../files/thing-1.0-py3-none-any.whl#sha256={offered}"
    page.write_text(f'<!DOCTYPE html><html><body><a href="{link}">thing-1.0-py3-none-any.whl</a></body></html>')
    locked(made, offered)
    return made


def locked(place: Place, sha256: str) -> None:
    (place.path / "requirements" / "main.txt").write_text(f"# made\n\nthing==1.0 \\\n    --hash=sha256:{sha256}\n")


def test_what_is_locked_is_installed(place: Place) -> None:
    done = place.install()
    assert done.returncode == 0 and place.installed(), done.stderr


def test_another_file_of_the_same_version_stops_it(place: Place) -> None:
    """Whoever serves the index says of his file what its hash is, which helps him nothing."""
    locked(place, "0" * 64)
    done = place.install()
    assert done.returncode == 1 and not place.installed()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("make: a file that the package index offers is not the one") and "Traceback" not in last


def test_a_pin_that_no_layer_has_stops_it_before_anything_is_asked_for(place: Place) -> None:
    project = place.path / "pyproject.toml"
    project.write_text(project.read_text().replace("thing==1.0", "thing==1.1"))
    done = place.install(PIP_INDEX_URL="file:///nowhere")
    assert (done.returncode, place.installed()) == (1, False)
    assert done.stderr.splitlines() == [
        *(f"make: pyproject.toml asks for thing 1.1, requirements/{name}.txt has 1.0" for name in EXTRAS),
        "make: run `make lock`",
    ]


def test_a_file_of_this_machines_own_is_taken_aloud(place: Place) -> None:
    locked(place, "0" * 64)
    shutil.rmtree(place.path / "index" / "thing")
    path, own = wheel(place.path / "own", "SERVED = 'by nobody'\n")
    done = place.install(PIP_FIND_LINKS=str(path.parent))
    assert done.returncode == 0 and place.installed(), done.stderr
    assert f"{path} is not in requirements/: allowed since it lies on this machine; sha256 {own}" in done.stderr


# --- this machine's own files -----------------------------------------------------------------------------------------


def test_only_folders_are_this_machines_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b c").mkdir()
    said = (
        f":env:.find-links='{tmp_path / 'a'} https://wheels.example/simple'\n"
        f"global.find-links='\\n{(tmp_path / 'b c').as_uri()}\\n{tmp_path / 'gone'}'\n"
        f"global.index-url='{tmp_path}'\n"
    )
    assert folders(said) == [tmp_path / "a", tmp_path / "b c"]


def test_this_machines_cpu_build_takes_the_place_of_torch_and_its_cuda_libraries() -> None:
    version = layer(TORCH)[TORCH].version
    own = [(TORCH, f"{version}+cpu", Path("torch.whl")), (TORCH, "1.0+cpu", Path("old.whl"))]
    assert cpu_build(version, own) == f"{version}+cpu"
    assert cpu_build(version, [(TORCH, f"{version}+cu130", Path("torch.whl")), *own[1:]]) is None
    plain, with_own = chosen(["main"], []), chosen(["main"], own)
    assert plain[TORCH].version == version and plain["triton"].marker == 'sys_platform == "linux"'
    assert with_own[TORCH].version == f"{version}+cpu" and plain.keys() - with_own.keys() >= {"triton", "nvidia-cublas"}
    assert with_own.keys() == plain.keys() - layer(TORCH).keys() | {TORCH}
