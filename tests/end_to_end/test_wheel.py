"""A wheel of the project trains outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
BUILD = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
SHORT = ["run.steps=2", "evaluation.problems=8", "training.rollouts_per_step=32", "actor.groups_in_flight=8"]


def test_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    # Build from a copy of the sources, because setuptools writes files next to them.
    sources = tmp_path / "sources"
    for name in ("pipelinerl", "launch", "inference_contract", "trainer_contract"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    subprocess.run([sys.executable, *BUILD, "--wheel-dir", str(tmp_path), str(sources)], check=True)
    (wheel,) = tmp_path.glob("pipelinerl-*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(installed)
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import launch, pipelinerl; print(launch.__file__, pipelinerl.__file__)"],
        cwd=elsewhere, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(Path(path).is_relative_to(installed) for path in where.stdout.split())
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl", "run", "tiny", *SHORT],
        cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (elsewhere / "runs" / "tiny" / "report.html").is_file()
