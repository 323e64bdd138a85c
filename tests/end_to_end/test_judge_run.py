"""A live run whose judge is an engine of this project: it judges, keeps its own weights, and is killed.

The judge is the shipped model of `rlvr`, which has learned to print numbers. Its scores are arbitrary, and sometimes it
prints none. Answers are therefore judged or masked, and the run reports which.
"""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.live_run import launched, light_run
from tests.fakes.standalone_engine import standalone_engine
from tests.patience import PATIENCE_S

_MODEL = Path(__file__).parents[2] / "pipelinerl" / "models" / "tiny_rlvr"
#: Context length in tokens, enough for a judge's prompt with these problems and answers.
_CONTEXT = 768
_STEPS = 6


@contextmanager
def judge(folder):
    """Yield the address and the process of a standalone engine."""
    model = folder / "model"
    shutil.copytree(_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}))
    with standalone_engine(model, folder, f"engine.context_length={_CONTEXT}", "engine.slots=16") as serving:
        yield serving


@pytest.mark.slow
def test_run_judged_by_an_engine_fails_with_the_last_error_after_that_engine_is_killed(tmp_path):
    (tmp_path / "judge").mkdir()
    with judge(tmp_path / "judge") as (url, engine):
        before = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()
        options = "low = 0, high = 9, pattern = '([0-9])', temperature = 1.0, max_tokens = 8, timeout_s = 5"
        domain = (
            f"name = 'divisors', source = 'reasoning_gym:gcd', verifier = 'judge', judge = {{url = '{url}', {options}}}"
        )
        few = ("run.steps=10000", "evaluation.problems=4", "training.rollouts_per_step=32", "training.no_signal=train")
        with launched(light_run(tmp_path / "run", *few, f"domains=[{{{domain}}}]"), tmp_path / "run") as run:
            run.until_step(_STEPS)
            judged = [step["by_domain"]["divisors"] for step in run.events("step")]
            assert all(0 < each["reward"] < 1 and each["reward.judge"] == each["reward"] for each in judged)
            assert sum(each["verified"] for each in judged) > sum(each["verifier_errors"] for each in judged) > 0
            after = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()
            assert after == before and after["data"][0]["model_version"] == 0, "no trainer has reached it"
            engine.kill()
            assert run.end() == 1, run.story()
            (failed,) = run.events("run_failed")
            steps = run.events("step")
            assert run.is_gone()
    assert re.fullmatch(
        r"the verifier of domain divisors has failed on \d+ answers in a row; the last error: verifier_error: .*",
        failed["reason"],
    )
    assert run.output.rstrip().splitlines()[-1] == f"failed: {failed['reason']}"
    rewards = [step["by_domain"]["divisors"]["reward"] for step in steps if "reward" in step["by_domain"]["divisors"]]
    assert all(reward > 0 for reward in rewards), "what the dead judge did not judge is no 0"
