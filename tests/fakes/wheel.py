"""A wheel of the project, installed outside the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def install(folder):
    """Build a wheel and install it, without its dependencies; return the directory to add to the module path."""
    # Build from a copy of the sources, because setuptools writes files next to them.
    sources, installed = folder / "sources", folder / "installed"
    for name in ("pipelinerl", "launch", "inference_contract", "trainer_contract"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    built = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(sources)]
    subprocess.run([*PIP, "wheel", *built], check=True)
    (wheel,) = folder.glob("pipelinerl-*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], check=True)
    return installed
