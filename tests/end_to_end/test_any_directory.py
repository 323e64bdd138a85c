"""Live runs from a bfloat16 model directory, which is the usual case, and runs that fail with a stated reason."""

import re

import pytest
import torch

from tests.fakes.live_run import launched, light_run, new_run
from tests.roles.test_dtypes import directory

FEW = ("run.steps=2", "evaluation.problems=4", "training.rollouts_per_step=32", "training.no_signal=train")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="the model's own dtype"),
        pytest.param(("engine.dtype=float32", "trainer.precision=bf16"), id="fp32 engine and bf16 trainer"),
    ],
)
@pytest.mark.slow  # test_own_reward.py tests this faster, with a user's reward function
def test_run_on_a_bfloat16_model_directory_trains_in_its_own_or_another_dtype(tmp_path, overrides):
    model = directory(tmp_path / "model", torch.bfloat16, config="bfloat16", keep="norm")
    with launched(new_run(tmp_path / "run", f"model.path={model}", *FEW, *overrides), tmp_path / "run") as run:
        assert run.end() == 0, run.story()
        assert run.steps() == [1, 2]
        assert run.events("engine_verified") and not run.events("engine_lost"), run.story()


def test_run_with_a_failing_verifier_ends_with_the_reason(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion_text):\n    return float('nan')\n")
    domain = f'[{{name = "sums", source = "addition", verifier = "{tmp_path}/mine.py:score"}}]'
    with launched(light_run(tmp_path / "run", *FEW, f"domains={domain}"), tmp_path / "run") as run:
        assert run.end() == 1, run.story()
        (failing,), (failed,) = run.events("run_failing"), run.events("run_failed")
    assert re.fullmatch(
        r"the verifier of domain sums has failed on \d+ answers in a row; the last error: verifier_error: .*",
        failed["reason"],
    )
    assert run.output.rstrip().splitlines()[-1] == f"failed: {failed['reason']}"
    assert failed["elapsed_s"] - failing["elapsed_s"] < 60


def test_run_in_which_no_answer_is_ever_right_fails_as_hopeless_with_status_1(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion_text):\n    return 0.0\n")
    domain = f'[{{name = "sums", source = "addition", verifier = "{tmp_path}/mine.py:score"}}]'
    ends = ("training.no_signal=filter", "run.no_signal_steps=2", "run.steps=1000")
    with launched(light_run(tmp_path / "run", *ends, f"domains={domain}"), tmp_path / "run") as run:
        assert run.end() == 1, run.story()
        (failed,) = run.events("run_failed")
    assert failed["reason"].startswith("hopeless: ")
    assert run.output.rstrip().splitlines()[-1] == f"failed: {failed['reason']}"
