"""Simulate RL schedules of a model of 7 billion weights on 8, 64 and 512 H100s, by published figures.

Nothing is measured here. All arms train on 1,024 rollouts per optimizer step, with answers whose lengths are
heavy-tailed (log-normal, median 900 tokens, at most 8,192). Conventional RL generates on all GPUs and then trains on
all of them. The asynchronous arms divide the GPUs between engines and trainer; the best of several divisions counts.
The figure is optimizer steps per hour, relative to conventional RL with one optimizer step per generation (G = 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.measure import Row, report
from inference_contract.weights import OnUpdate
from pipelinerl.plugins.simulation.published import mean_context, published_hardware
from pipelinerl.plugins.simulation.setting import HeavyTailedLengths, SimulatedSetting
from pipelinerl.plugins.simulation.simulator import simulate
from pipelinerl.staleness import StalenessBounds

GPUS: Final = (8, 64, 512)
GENERATIONS: Final = (1, 4, 8, 16)
#: Rollouts of an optimizer step, rollouts of a group, prompt tokens, and sequences that an engine decodes at once.
_BATCH: Final = 1024
_GROUP: Final = 8
_PROMPT: Final = 150
_ROWS: Final = 128
_LENGTHS: Final = HeavyTailedLengths(900.0, 0.8, 8192)
_TABLE: Final = published_hardware("h100:7b")
#: Shares of GPUs used for generation. Asynchronous arms are simulated with all of them; the best counts.
_SHARES: Final = (0.25, 0.375, 0.5, 0.625, 0.75)
_BOUNDS: Final[Mapping[str, StalenessBounds]] = {
    "one step off": StalenessBounds(1, 2),
    "in flight, k = 8": StalenessBounds(1, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Result of an arm on `gpus` GPUs: `engines` of them generate, the others train; in conventional RL all do both."""

    arm: str
    gpus: int
    engines: int
    steps_per_hour: float
    lag: float
    """Mean number of optimizer steps from the sampling of a rollout's oldest token to its training."""
    trainer_computes: float


def run(quick: bool = False) -> None:
    """Simulate, print and record."""
    scaled = [each for gpus in GPUS[: 1 if quick else None] for each in arms(gpus, steps=8 if quick else 40)]
    first = {
        each.gpus: each.steps_per_hour for each in reversed(scaled) if each.arm == f"conventional G = {GENERATIONS[0]}"
    }
    rows = []
    for each in scaled:
        speed = f"{each.steps_per_hour / first[each.gpus]:.2f} ({each.steps_per_hour:.0f} steps/h"
        others = f"{each.engines} generate, lag {each.lag:.1f}, trainer computes {each.trainer_computes:.0%})"
        rows.append(Row(f"{each.gpus} H100s: {each.arm}", f"{speed}, {others}"))
    title = "simulated schedules, 7B: optimizer steps per hour ÷ those of conventional G = 1"
    report("simulated_schedules", rows, {"arms": [asdict(each) for each in scaled]}, quick=quick, title=title)


def arms(gpus: int, *, steps: int) -> list[Scaled]:
    """Simulate every arm on this number of GPUs."""
    scaled = []
    for g in GENERATIONS:
        on_policy = StalenessBounds(1, 1)
        scaled.append(_simulated(f"conventional G = {g}", gpus, gpus, on_policy, OnUpdate.DRAIN, batches=g, steps=4))
    for name, bounds in _BOUNDS.items():
        divided = [
            _simulated(name, gpus, round(gpus * share), bounds, OnUpdate.CONTINUE, batches=1, steps=steps)
            for share in _SHARES
        ]
        scaled.append(max(divided, key=lambda each: each.steps_per_hour))
    return scaled


def _simulated(
    arm: str, gpus: int, engines: int, bounds: StalenessBounds, on_update: OnUpdate, *, batches: int, steps: int
) -> Scaled:
    """Simulate a schedule of `batches` steps per generation; its trainer has the GPUs without engine, or else all."""
    trainers, context = gpus - engines or gpus, mean_context(_LENGTHS, _PROMPT)
    rollouts = _BATCH * batches
    at_work = rollouts // _GROUP if bounds.k == 1 else 2 * engines * _ROWS // _GROUP
    setting = SimulatedSetting(
        steps=steps,
        engines=engines,
        slots=_ROWS,
        bounds=bounds,
        on_update=on_update,
        rollouts_per_step=rollouts,
        mini_batches=batches,
        group_size=_GROUP,
        lengths=_LENGTHS,
        prompt_tokens=_PROMPT,
        groups_in_flight=at_work,
        max_groups=at_work + rollouts // _GROUP,
    )
    predicted = simulate(setting, _TABLE.times(engine_devices=1, trainer_devices=trainers, rows=_ROWS, context=context))
    return Scaled(
        arm=arm,
        gpus=gpus,
        engines=engines,
        steps_per_hour=batches * predicted.steps_per_hour,
        lag=(predicted.staleness_mean - 1) * batches + (batches + 1) / 2,
        trainer_computes=predicted.trainer_computes,
    )
