"""`make test`: both of its parts are run whatever becomes of the first, and its last lines say what was and was not.

What failed beside other tests is tried once more, alone, unless it is much; it is named in the last lines either way.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
#: An interpreter that says what it is asked for. When its environment's name is in the file `fails` it fails `failing`
#: tests where it is to write down what failed; once more and alone they fail where `alone` is in there.
INTERPRETER = """#!/bin/sh
[ -z "$PYTHONDONTWRITEBYTECODE" ] || exit 9
echo "$0 $*" >> "{folder}/asked"
grep -qx "{name}" "{folder}/fails" || exit 0
while [ $# -gt 0 ] && [ "${{1#--failures=}}" = "$1" ]; do shift; done
[ $# -gt 0 ] || ! grep -qx "alone\\|second" "{folder}/fails"
failed=$?
[ $# -gt 0 ] || exit $failed
written=${{1#--failures=}}
for each in $(seq {failing}); do printf "tests/test_it.py::test_$each\\tit was 5 %% late\\n"; done > "$written"
exit 1
"""


def made(folder: Path, *words: str, fails: str = "", failing: int = 0) -> tuple[int, str, str]:
    """`make` over environments of the test's: its status, what it printed, what its interpreters were asked for."""
    (folder / "fails").write_text(fails)
    for name in ("first", "second"):
        interpreter = folder / name / "bin" / "python"
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text(INTERPRETER.format(folder=folder, name=name, failing=failing))
        interpreter.chmod(0o755)
        for stamp in (".installed", ".installed-dev"):
            (folder / name / stamp).touch()
    environments = [f"VENV={folder}/first", f"VLLM={folder}/second", "SANDBOX=", "BROWSER="]
    done = subprocess.run(
        ["make", "-C", str(ROOT), *environments, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        # Not what a `make` around this test was told, but what images of containers say.
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, done.stdout, (folder / "asked").read_text() if (folder / "asked").exists() else done.stderr


@pytest.mark.parametrize("fails", ["", "first", "second", "first\nsecond"])
def test_both_parts_are_run_and_either_may_fail(tmp_path: Path, fails: str) -> None:
    status, printed, asked = made(tmp_path, "test", "WITH_VLLM=1", fails=fails)
    first, second = sorted(asked.splitlines())  # they go on beside each other
    assert first.startswith(f"{tmp_path}/first/bin/python -m pytest -m ") and "and not vllm" in first
    assert " -n " in first and " --failures=" in first
    assert second.startswith(f"{tmp_path}/second/bin/python -m pytest -n ") and "-m vllm and not" in second
    assert "tests/engines/external/vllm/test_engine.py" in second and "test_actor.py" not in second
    assert bool(status) == bool(fails), printed
    told = [line.split(": ", 1)[1].rsplit(" in ")[0] for line in printed.splitlines() if line.startswith("make test: ")]
    ends = ["FAILED, status" if name in fails else "passed" for name in ("first", "second")]
    assert told[0].startswith(f"all but vLLM: {ends[0]}")
    assert told[1].startswith(f"vLLM, beside it: {ends[1]}")
    assert told[2].startswith("left out: architecture (make check), slow (make test ARGS='-m slow'")


@pytest.mark.parametrize(("words", "why"), [(("WITH_VLLM=",), "WITH_VLLM is empty"), (("ARGS=-m slow",), "ARGS is")])
def test_it_says_when_vllms_part_is_left_out(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    status, printed, asked = made(tmp_path, "test", *words)
    assert (status, len(asked.splitlines())) == (0, 1)
    assert f"left out: vLLM's part ({why}" in printed


@pytest.mark.parametrize(
    ("failing", "fails", "words", "tried", "fine"),
    [
        (2, "first", (), True, True),
        (2, "first\nalone", (), True, False),
        (2, "first\nsecond", ("WITH_VLLM=1",), True, False),
        (11, "first", (), False, False),
        (2, "first", ("AGAIN=1",), False, False),
        (2, "first", ("ARGS=-k it",), False, False),
    ],
)
def test_what_failed_beside_others_is_tried_alone_and_named(
    tmp_path: Path, failing: int, fails: str, words: tuple[str, ...], tried: bool, fine: bool
) -> None:
    status, printed, asked = made(tmp_path, "test", "WITH_VLLM=", *words, fails=fails, failing=failing)
    assert (status == 0) == fine, printed
    again = [line for line in asked.splitlines() if " @" in line]
    assert len(again) == tried and all("pytest -m" in line and " -n " not in line for line in again)
    assert ("make test: what failed beside others, alone: " in printed) == tried
    named = [line for line in printed.splitlines() if line.startswith("make test: failed beside others: tests/test_it")]
    assert len(named) == failing and named[0].endswith("test_1\tit was 5 % late")
