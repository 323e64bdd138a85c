"""Real runs with vLLM as the engine learn the task, with vLLM in the engine's process and with a stock server.

The recipe is `tiny_vllm`, with a smaller budget. Held-out accuracy must rise beyond noise: the 95 % interval of the
last evaluation lies above that of the first. A torch engine can be replaced by a vLLM engine and back while the run
trains.
"""

import subprocess

import pytest

from pipelinerl.component import missing_packages
from pipelinerl.config.sections import MODELS
from pipelinerl.registry import ENGINES
from tests.fakes import stock_vllm
from tests.fakes.live_fleet import assert_nothing_lost, swap_to_and_fro, until_serving
from tests.fakes.live_run import CLI, launched, new_run
from tests.patience import PATIENCE_S

STEPS = 60

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(missing_packages(ENGINES["vllm"]), reason="vLLM is not installed; make test-vllm"),
    pytest.mark.timeout(1500),
]


def _arguments(directory, *changes):
    budget = (f"run.steps={STEPS}", f"evaluation.interval_steps={STEPS}", "launch.start_timeout_s=600")
    return ["tiny_vllm", *budget, f"run.directory={directory.parent}", f"run.name={directory.name}", *changes]


def _has_learned(run):
    """Assert that the run made every step, its ledger balances, and its accuracy rose."""
    assert run.end(1200.0) == 0, run.story()
    assert run.steps() == list(range(1, STEPS + 1))
    (finished,) = run.events("run_finished")
    ledger = finished["ledger"]
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued"), ledger
    first, last = run.events("evaluation")
    assert (first["model_version"], last["model_version"]) == (0, STEPS)
    assert first["high"] < last["low"], (first, last)


def test_run_with_a_vllm_engine_learns_its_task(tmp_path):
    with launched(_arguments(tmp_path / "inside"), tmp_path / "inside") as run:
        _has_learned(run)


@pytest.mark.slow
def test_run_completes_after_its_vllm_core_process_is_killed(tmp_path):
    with launched(_arguments(tmp_path / "run"), tmp_path / "run") as run:
        run.until_step(5, timeout_s=600.0)
        core = next(child for child in run.role("engine-0").children(recursive=True) if "EngineCore" in child.name())
        core.kill()
        assert run.end(1200.0) == 0, run.story()
        assert run.steps() == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_run_with_a_stock_vllm_server_learns_its_task(tmp_path):
    model = MODELS / "tiny_speller_heads32"
    options = (*stock_vllm.AS_DOCUMENTED, "--disable-log-stats")
    with stock_vllm.serving(model, tmp_path / "server.log", *options, context_length=32, slots=256) as url:
        stock = ("engine.type=vllm_server", f'engine.servers=["{url}"]')
        with launched(_arguments(tmp_path / "outside", *stock), tmp_path / "outside") as run:
            _has_learned(run)


@pytest.mark.slow
def test_torch_engine_is_replaced_by_vllm_and_back_under_load(tmp_path):
    directory = tmp_path / "run"
    endless = ("run.steps=100000", "staleness.k=8", "model.path=shipped:tiny_speller_heads32", "launch.restarts=1000")
    with launched(new_run(directory, *endless, "launch.start_timeout_s=600"), directory) as run:
        until_serving(run, "engine-0")
        swap_to_and_fro(run, ["vllm", "torch"], times=2)
        subprocess.run([*CLI, "stop", str(directory)], check=True, capture_output=True, timeout=PATIENCE_S)
        assert run.end(120) == 0, run.story()
    assert_nothing_lost(run)
