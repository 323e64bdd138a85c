"""Comparisons of training methods, simulated with the shipped hardware tables, agree with those in two papers.

    PipelineRL   arXiv:2509.19128, 7B on 128 H100s: in flight against conventional RL with G = 32 (§5, figure 5c),
                 and the authors' own model of both at equal lag (appendix A.4, figure 9)
    RLAX         arXiv:2512.06392, 32B: inference on v5p-128 to v5p-1024 with a v5p-512 trainer (§7.1, figure 3a),
                 and k = 16 against k = 32 (§7.2, figure 4)

Settings that a paper states are used as stated. The other settings (lengths, prompts, group sizes, and RLAX's batch)
are assumptions, equal for all methods that are compared. docs/understand/simulation.md discusses them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import pytest

from inference_contract.weights import OnUpdate
from pipelinerl.plugins.simulation.hardware import TrainerTimes
from pipelinerl.plugins.simulation.published import mean_context, published_hardware
from pipelinerl.plugins.simulation.setting import HeavyTailedLengths, ObservedLengths, SimulatedSetting
from pipelinerl.plugins.simulation.simulator import simulate
from pipelinerl.staleness import StalenessBounds

#: The largest relative deviation from a published value at which the simulation counts as reproducing the value.
TOLERANCE: Final = 0.25

# --- PipelineRL, §5: batch, rows and GPUs are published ---------------------------------------------------------------

_BATCH, _ROWS, _GPUS, _GENERATE = 1024, 64, 128, 48
#: The maximal length of an answer in tokens, from the authors' post on the 7B run and their default configuration.
_MOST_TOKENS: Final = 8192
#: The mean length of an answer in tokens. §5 reports lags of over 50,000 rollouts, and by A.3 the largest lag is
#: rows · GPUs · longest length ÷ mean length.
_MEAN_TOKENS: Final = _ROWS * _GENERATE * _MOST_TOKENS / 50_000
#: The number of tokens in a prompt (assumed) and of rollouts in a group (from the authors' default configuration).
_PROMPT, _GROUP = 150, 8
#: Appendix A.4: B = 128, 44 of 128 GPUs generate with 192 rows each, the lag is 133 steps, lengths are uniform.
_A4_BATCH, _A4_GENERATE, _A4_ROWS, _A4_LAG = 128, 44, 192, 133
#: The utilisation of a GPU in training. A.4's r_train is 26.02 tokens per flash on 128 GPUs. A flash is the time of a
#: forward pass over one token at peak speed, and training on one token takes 3 of them.
_A4_UTILISATION: Final = 3 * 26.02 / 128

# --- RLAX, §7: clusters, (j, k) and the context of 16k tokens are published -------------------------------------------

_TRAINER_CHIPS: Final = 256  # a v5p-512 slice, on which RLAX trains, has 256 chips
_ENGINE_CHIPS: Final = 4  # assumed: each engine is one host
#: Assumed numbers: rollouts in a step, rollouts in a group, tokens in a prompt, tokens in the median answer.
_RLAX_BATCH, _RLAX_GROUP, _RLAX_PROMPT, _RLAX_MEDIAN = 1024, 16, 500, 8000.0
_CONTEXT: Final = 16_384
#: The time of a training step, relative to one of three forward passes. §5.1: the trainer also recomputes all
#: activations and the old log-probs, which takes two more forward passes.
_RECOMPUTED: Final = 5 / 3


H100: Final = published_hardware("h100:7b")
#: Log-normal lengths with the mean `_MEAN_TOKENS` before they are truncated to `_MOST_TOKENS`.
LENGTHS: Final = HeavyTailedLengths(_MEAN_TOKENS * math.exp(-1 / 2), 1.0, _MOST_TOKENS)
_IN_FLIGHT: Final = {"bounds": StalenessBounds(1, math.inf), "on_update": OnUpdate.CONTINUE}


def on_h100s(table, *, engines, trainers, rows, context, **setting):
    """Simulate a run whose engines take one GPU each."""
    times = table.times(engine_devices=1, trainer_devices=trainers, rows=rows, context=context)
    return simulate(SimulatedSetting(engines=engines, slots=rows, **setting), times)


def in_batches(batch, batches):
    """Return the settings of a run that generates `batches` batches before it trains on them."""
    sizes = dict.fromkeys(("rollouts_per_step", "groups_in_flight", "max_groups"), batch * batches)
    return {"bounds": StalenessBounds(1, 1), "on_update": OnUpdate.DRAIN, "mini_batches": batches} | sizes


_RUN: Final = {
    "rows": _ROWS,
    "prompt_tokens": _PROMPT,
    "group_size": _GROUP,
    "lengths": LENGTHS,
    "context": mean_context(LENGTHS, _PROMPT),
}


def conventional(*, steps):
    """Simulate conventional RL: all GPUs generate 32 batches, then all train on them."""
    return on_h100s(H100, steps=steps, engines=_GPUS, trainers=_GPUS, **_RUN, **in_batches(_BATCH, 32))


def in_flight(*, steps):
    """Simulate in-flight updates: 48 GPUs generate while 80 train.

    The paper's algorithm 2 keeps the rows full by replacing each sequence that ends. Here a group is in flight
    until its longest answer ends, so four rollouts per row are kept in flight to fill the rows.
    """
    gpus = {"engines": _GENERATE, "trainers": _GPUS - _GENERATE}
    waiting = {"rollouts_per_step": _BATCH, "groups_in_flight": 4 * _GENERATE * _ROWS // _GROUP}
    return on_h100s(H100, steps=steps, **gpus, **_RUN, **_IN_FLIGHT, **waiting)


def equal_lag(*, steps):
    """Simulate appendix A.4; return the tokens per flash of conventional RL and those of in-flight updates."""
    table = replace(H100, accelerator=replace(H100.accelerator, utilisation=_A4_UTILISATION))
    flash_s = 2 * table.size.parameters / table.accelerator.flops
    # Like the appendix, ignore the cost of attention: in a context of 0 tokens it takes no time.
    same = {
        "rows": _A4_ROWS,
        "context": 0,
        "group_size": 1,
        "lengths": ObservedLengths(tuple(range(1, _MOST_TOKENS + 1))),
    }
    slow = on_h100s(table, steps=2, engines=_GPUS, trainers=_GPUS, **same, **in_batches(_A4_BATCH, _A4_LAG + 1))
    fast = on_h100s(
        table, steps=steps, engines=_A4_GENERATE, trainers=_GPUS - _A4_GENERATE, **same, **_IN_FLIGHT,
        rollouts_per_step=_A4_BATCH, groups_in_flight=2 * _A4_GENERATE * _A4_ROWS, max_groups=_A4_BATCH * (_A4_LAG + 1),
        steps_ahead=math.inf,  # the appendix fixes the lag and keeps all rows busy
    )  # fmt: skip
    return slow.tokens_per_s * flash_s, fast.tokens_per_s * flash_s


def rlax(cores, *, steps, bounds=(16, 32), trains=True):
    """Simulate RLAX with an inference cluster of `cores`; without `trains`, training takes no time."""
    table = published_hardware("v5p:32b")
    lengths = HeavyTailedLengths(_RLAX_MEDIAN, 0.5, _CONTEXT - _RLAX_PROMPT)
    context = mean_context(lengths, _RLAX_PROMPT)
    rows = table.rows_that_fit(engine_devices=_ENGINE_CHIPS, context=context) // _RLAX_GROUP * _RLAX_GROUP
    times = table.times(engine_devices=_ENGINE_CHIPS, trainer_devices=_TRAINER_CHIPS, rows=rows, context=context)
    token_s = times.trainer.token_s * _RECOMPUTED
    times = replace(times, trainer=replace(times.trainer, token_s=token_s) if trains else TrainerTimes(token_s=0.0))
    engines = cores // 2 // _ENGINE_CHIPS
    setting = SimulatedSetting(
        steps=steps,
        engines=engines,
        slots=rows,
        bounds=StalenessBounds(*bounds),
        on_update=OnUpdate.ABORT,  # §8: RLAX's workers discard partial rollouts when they refresh their weights
        rollouts_per_step=_RLAX_BATCH,
        group_size=_RLAX_GROUP,
        lengths=lengths,
        prompt_tokens=_RLAX_PROMPT,
        groups_in_flight=2 * engines * rows // _RLAX_GROUP,
        attempts=steps,
    )
    return simulate(setting, times)


def test_simulated_engines_keep_all_rows_of_their_decode_batch_busy_with_in_flight_updates():
    assert in_flight(steps=90).rows == pytest.approx(64, abs=1)


@pytest.mark.slow
def test_simulated_speedup_of_in_flight_updates_over_conventional_rl_matches_the_paper():
    fast, slow = in_flight(steps=60), conventional(steps=2)
    assert fast.rollouts_per_s / slow.rollouts_per_s == pytest.approx(2.0, rel=TOLERANCE)


@pytest.mark.slow
def test_simulated_throughput_of_conventional_and_in_flight_updates_at_equal_lag_matches_the_paper():
    slow, fast = equal_lag(steps=600)
    assert (slow, fast) == (pytest.approx(10.7, rel=TOLERANCE), pytest.approx(16.9, rel=TOLERANCE))
    assert fast / slow == pytest.approx(1.57, rel=TOLERANCE)


@pytest.mark.slow
def test_simulated_speedup_of_larger_inference_clusters_matches_the_paper():
    alone = [rlax(cores, steps=160, bounds=(10**6, math.inf), trains=False).tokens_per_s for cores in (128, 1024)]
    assert alone[1] / alone[0] == pytest.approx(8.0, rel=TOLERANCE)
    assert rlax(128, steps=80).step_s / rlax(1024, steps=80).step_s == pytest.approx(3.6, rel=TOLERANCE)


@pytest.mark.slow
def test_simulated_cost_of_a_tighter_staleness_bound_matches_the_paper():
    tight, loose = rlax(512, steps=80, bounds=(16, 16)), rlax(512, steps=80)
    assert tight.step_s / loose.step_s == pytest.approx(75 / 45, rel=TOLERANCE)
