"""`make install` chooses torch's build; pip is replaced by a script that logs its arguments and fails on demand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The python of the environment: `-c` looks for the installed torch, and `-m pip` installs; a file lets each succeed.
PYTHON = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/log"
case "$*" in
  -c*) [ -e "$(dirname "$0")/has-cpu-torch" ] ;;
  *torch-cpu.txt*) [ -e "$(dirname "$0")/has-cpu-wheel" ] ;;
esac
"""


@pytest.mark.parametrize(
    ("at_hand", "arguments", "last", "warns"),
    [
        ("has-cpu-torch", (), "-c ", False),
        ("has-cpu-wheel", (), "requirements/torch-cpu.txt", False),
        (None, ("TORCH_INDEX=file:///builds",), "--index-url file:///builds torch==", False),
        (None, (), "requirements/torch-cuda.txt", True),
    ],
)
def test_make_install_prefers_a_cpu_build_of_torch_and_announces_the_size_of_cuda(
    tmp_path, at_hand, arguments, last, warns
):
    if shutil.which("nvidia-smi"):
        pytest.skip("a machine with an NVIDIA driver gets CUDA without a remedy")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    if at_hand is not None:
        (tmp_path / "bin" / at_hand).touch()
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path}", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "TORCH_INDEX")},
        capture_output=True,
        text=True,
        check=True,
    )
    *_, torch, _project = (tmp_path / "bin" / "log").read_text().splitlines()
    assert last in torch
    assert ("5.1 GB" in done.stderr and "TORCH_INDEX=URL" in done.stderr) == warns
