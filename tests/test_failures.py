"""`--failures`: each test that failed, or whose beginning or end did, once, with its reason on its line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def troubled():
    yield
    raise OSError("its end")

def test_fine(): pass
def test_wrong(): assert 1 == 2, "one\\tis\\nnot two"
def test_twice(troubled): raise ValueError("its middle")
def test_its_end(troubled): pass
"""


def test_what_failed_is_written_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    options = ["-p", "tests.failures", "-c", "/dev/null", "--continue-on-collection-errors", "--failures=failures"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"--rootdir={tmp_path}"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stdout
    failures = dict(line.split("\t") for line in (tmp_path / "failures").read_text().splitlines())
    assert failures.pop("test_broken.py") == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert failures.pop("test_it.py::test_wrong").startswith("AssertionError: one is not two")
    assert failures == {
        "test_it.py::test_twice": "ValueError: its middle",
        "test_it.py::test_its_end": "OSError: its end",
    }
