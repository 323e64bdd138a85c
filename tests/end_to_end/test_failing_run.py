"""Live runs whose verifier makes progress impossible end with status 1 and the reason."""

import re

import pytest

from tests.fakes.live_run import launched, light_run

FEW = ("run.steps=1000", "evaluation.problems=4", "training.rollouts_per_step=32")


@pytest.mark.parametrize(
    ("reward", "changes", "reason"),
    [
        (
            "float('nan')",
            ("training.no_signal=train",),
            r"the verifier of domain sums has failed on \d+ answers in a row; the last error: verifier_error: .*",
        ),
        ("0.0", ("training.no_signal=filter", "run.no_signal_steps=2"), "hopeless: .*"),
    ],
    ids=["the verifier fails", "no answer is right"],
)
def test_run_that_cannot_go_on_ends_with_the_reason(reward, changes, reason, tmp_path):
    (tmp_path / "mine.py").write_text(f"def score(completion_text):\n    return {reward}\n")
    domain = f'[{{name = "sums", source = "addition", verifier = "{tmp_path}/mine.py:score"}}]'
    with launched(light_run(tmp_path / "run", *FEW, *changes, f"domains={domain}"), tmp_path / "run") as run:
        assert run.end() == 1, run.story()
        (failed,) = run.events("run_failed")
    assert re.fullmatch(reason, failed["reason"])
    assert run.output.rstrip().splitlines()[-1] == f"failed: {failed['reason']}"
    for failing in run.events("run_failing"):
        assert failed["elapsed_s"] - failing["elapsed_s"] < 60
