"""Compare the lag that `staleness.mode = "auto"` holds with the best of seven fixed settings, simulated.

Nothing is measured here. A cell is a distribution of answer lengths × the slower side × a number of devices × the time
of a publication × the cost of lag. Half of the devices sample and half train; with two, both roles have one. `shared`
is one machine whose processors do both: with lag each side has half of them, on policy each has all in turn. Learning
per hour is steps per hour × what a step teaches, 1 / (1 + c (age − 1)² / 2) on average over its rollouts. c is 0.02 in
`calibrated` cells, a third of that in `cold` ones and three times as much in `hot` ones (see `USUAL_COST`).

A cell's figure is the learning per hour of its best fixed setting ÷ that of auto, median over the draws of lengths.
The settings are compared on the same draws. Then lengths, trainer or engines change in the middle of a run: it has
settled once every eight steps in a row learn at 85 % of the rate that it holds in the end.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product, starmap
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.measure import Row, print_table, read_record, write_record
from inference_contract.weights import OnUpdate
from pipelinerl import rng
from pipelinerl.controller.state.lag import USUAL_COST, taught
from pipelinerl.plugins.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.plugins.simulation.prediction import Prediction, SimulatedStep
from pipelinerl.plugins.simulation.setting import (
    FixedLengths,
    HeavyTailedLengths,
    LengthLaw,
    Shift,
    SimulatedSetting,
    drawing,
)
from pipelinerl.plugins.simulation.simulator import simulate, simulated_steps
from pipelinerl.staleness import AUTO, MODES, StalenessBounds

LENGTHS: Final[Mapping[str, LengthLaw]] = {
    "equal": FixedLengths(400),
    "log-normal": HeavyTailedLengths(330.0, 0.6, 4096),
    "heavy": HeavyTailedLengths(230.0, 1.0, 4096),
}
#: The trainer's seconds for a step ÷ the engines' with full rows.
SIDES: Final[Mapping[str, float]] = {"trainer-bound": 2.0, "balanced": 1.0, "engine-bound": 0.5, "shared": 1.0}
#: Rollouts of a step, by number of devices.
DEVICES: Final[Mapping[int, int]] = {2: 64, 8: 64, 64: 128, 512: 256}
#: A publication's seconds ÷ those of a step.
PUBLICATIONS: Final = (0.01, 0.1, 1.0)
#: c, the share of a step's learning that one more version of lag costs, at a lag of one.
COSTS: Final[Mapping[str, float]] = {"cold": USUAL_COST / 3, "calibrated": USUAL_COST, "hot": 3 * USUAL_COST}
#: Errors of the cost of lag as the run estimates it, as factors; only the first draw is simulated with them.
ERRORS: Final = (0.5, 2.0)
_K: Final = MODES[AUTO].k
#: Bounds and steps in flight of each fixed setting.
FIXED: Final[Mapping[str, tuple[StalenessBounds, float]]] = {
    "on policy": (StalenessBounds(1, 1), 2.0),
    **{f"{steps} steps in flight": (StalenessBounds(1, _K), float(steps)) for steps in (2, 3, 4, 6, 8)},
    "j = 2, 3 steps in flight": (StalenessBounds(2, _K), 3.0),
}
SHIFTS: Final[Mapping[str, Shift]] = {
    "lengths × 2": Shift(step=60, lengths=2.0),
    "lengths ÷ 2": Shift(step=60, lengths=0.5),
    "trainer × 2 slower": Shift(step=60, trainer=2.0),
    "half the engines": Shift(step=60, lost_engines=0.5),
}
#: Steps of a run, and of one whose conditions change.
_STEPS: Final = 100
_SHIFTED_STEPS: Final = 130
#: A run has settled once it learns at this share of its final rate in all windows of this many steps.
_SETTLED: Final = 0.85
_WINDOW: Final = 8
_SLOTS: Final = 64
_GROUP: Final = 4
_PROMPT: Final = 100
_ENGINE: Final = EngineTimes(step_s=0.02, row_s=2e-4, prompt_token_s=2e-5)


class Cell(NamedTuple):
    """The conditions of a run, by the names of their values in the tables above."""

    lengths: str
    side: str
    devices: int
    publication: float


class Chosen(NamedTuple):
    """Results of auto in one cell and draw; `ratio`: learning per hour of the best fixed setting ÷ that of auto.

    `length` is the mean length of the trained answers ÷ that of all answers. `misjudged` has the ratio by each error of
    the estimated cost of lag (`ERRORS`); it is empty if the draw was not simulated with errors.
    """

    ratio: float
    best: str
    age: float
    j: int
    discarded: float
    length: float
    misjudged: Sequence[float] = ()


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Simulate with each seed's draw of lengths, print and record; cells and draws in the record are kept."""
    cells = [Cell(*each) for each in product(LENGTHS, SIDES, DEVICES, PUBLICATIONS)][:: 16 if quick else 1]
    shifted = [cell for cell in cells if cell.side != "shared" and cell.publication == PUBLICATIONS[1]]
    changes = list(product(shifted[:: 9 if quick else 1], SHIFTS))
    kept = {} if quick else read_record("simulated_grid")
    results = {tuple(each["cell"]): list(starmap(Chosen, each["draws"])) for each in kept.get("cells", ())}
    settled = {tuple(each["cell"]): int(each["steps"]) for each in kept.get("settled", ())}
    draws = seeds[:1] if quick else seeds
    made = [(cell, draw) for draw in range(len(draws)) for cell in cells]
    made = [(cell, draw) for cell, draw in made if len(results.get((*cell, "cold"), ())) <= draw]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (cell, draw), by_cost in zip(made, pool.map(compared, *_columns(made, seeds)), strict=True):
            for cost, result in by_cost.items():
                results.setdefault((*cell, cost), []).append(result)
            print(f"draw {draw}: {', '.join(map(str, cell))}: {by_cost['calibrated'].ratio:.3f}", file=sys.stderr)
            _record(draws, results, settled, quick=quick)
        changes = [(cell, shift) for cell, shift in changes if (*cell, shift) not in settled]
        for (cell, shift), steps in zip(changes, pool.map(settled_after, *_columns(changes)), strict=True):
            settled[*cell, shift] = steps
    _record(draws, results, settled, quick=quick)
    found = [sorted(each, key=lambda draw: draw.ratio)[len(each) // 2] for each in results.values()]
    wrong = [result.misjudged for each in results.values() for result in each[:1]]
    print_table("simulated: best of seven fixed settings ÷ auto", [*_rows(found, wrong), *_settling(settled)])


def _columns(rows: Sequence[tuple[Any, ...]], seeds: Sequence[int] = ()) -> list[list[Any]]:
    """Return the arguments of a call per row, as `map` takes them; a number in the last column selects a seed."""
    first, last = ([row[0] for row in rows], [row[1] for row in rows])
    return [first, [seeds[each] for each in last] if seeds else last]


def _record(
    draws: Sequence[int],
    results: Mapping[tuple[Any, ...], Sequence[Chosen]],
    settled: Mapping[tuple[Any, ...], int],
    *,
    quick: bool,
) -> None:
    record = {
        "draws": list(draws),
        "cells": [{"cell": list(key), "draws": [list(each) for each in draws]} for key, draws in results.items()],
        "settled": [{"cell": list(key), "steps": steps} for key, steps in settled.items()],
    }
    write_record("simulated_grid", record, quick=quick)


def _rows(results: Sequence[Chosen], misjudged: Sequence[Sequence[float]]) -> list[Row]:
    ratios = [each.ratio for each in results]
    shares = {most: sum(ratio <= most for ratio in ratios) / len(ratios) for most in (1.05, 1.1)}
    discarded = [each.discarded for each in results]
    lengths = [each.length for each in results]
    wrong = zip(*filter(None, misjudged), strict=True)
    return [
        Row("cells", len(results)),
        Row("share of cells ≤ 1.05", f"{shares[1.05]:.1%}", ">= 98 %", shares[1.05] >= 0.98),
        Row("share of cells ≤ 1.10", f"{shares[1.1]:.1%}", "100 %", shares[1.1] == 1),
        Row("median, worst", f"{median(ratios):.3f}, {max(ratios):.3f}"),
        *(
            Row(
                f"≤ 1.05, worst, with κ × {error:g}",
                f"{sum(each <= 1.05 for each in column) / len(column):.1%}, {max(column):.3f}",
            )
            for error, column in zip(ERRORS, wrong, strict=True)
        ),
        Row(
            "discarded, mean and most",
            f"{np.mean(discarded):.2%}, {max(discarded):.2%}",
            "<= 0.5 %",
            max(discarded) <= 0.005,
        ),
        Row(
            "trained ÷ true mean length",
            f"{min(lengths):.3f} to {max(lengths):.3f}",
            "0.98 to 1.02",
            min(lengths) >= 0.98 and max(lengths) <= 1.02,
        ),
    ]


def _settling(settled: Mapping[tuple[Any, ...], int]) -> list[Row]:
    rows = []
    for shift in SHIFTS:
        steps = sorted(each for key, each in settled.items() if key[-1] == shift)
        soon = sum(each <= 12 for each in steps) / len(steps)
        text = f"median {median(steps):.0f}, {soon:.0%} within 12, worst {steps[-1]}"
        rows.append(Row(f"steps to settle, {shift}", text, "<= 12", steps[-1] <= 12))
    return rows


def compared(cell: Cell, draw: int, *, steps: int = _STEPS) -> dict[str, Chosen]:
    """Return the results of auto in a cell, by the cost of lag; the fixed settings do not depend on that cost."""
    setting, hardware = run_of(cell, draw, steps=steps)
    fixed = {
        name: simulate(replace(setting, bounds=bounds, steps_ahead=steps, auto_j=False), hardware)
        for name, (bounds, steps) in FIXED.items()
    }
    take = drawing(setting.lengths, draw)
    true = float(np.mean(take(20_000)))
    results = {}
    for name, cost in COSTS.items():
        speeds = {arm: each.steps_per_hour * _taught(each, cost) for arm, each in fixed.items()}
        best = max(speeds, key=lambda arm: speeds[arm])
        auto, *wrong = (
            simulate(replace(setting, lag_cost=cost, misjudged=error), hardware)
            for error in (1.0, *(ERRORS if draw == 0 else ()))
        )
        learning = speeds[best]
        results[name] = Chosen(
            ratio=learning / (auto.steps_per_hour * auto.learning),
            best=best,
            age=auto.staleness_mean,
            j=auto.j,
            discarded=auto.discarded,
            length=auto.mean_length / true,
            misjudged=[learning / (each.steps_per_hour * each.learning) for each in wrong],
        )
    return results


def _taught(prediction: Prediction, cost: float) -> float:
    return sum(share * taught(age - 1, cost) for age, share in prediction.staleness.items())


def settled_after(cell: Cell, shift: str) -> int:
    """Return the number of steps after a change of conditions until the run never learns much below its final rate."""
    setting, hardware = run_of(cell, 0, steps=_SHIFTED_STEPS)
    changed = SHIFTS[shift]
    steps = simulated_steps(replace(setting, lag_cost=COSTS["calibrated"], shift=changed), hardware)
    final = _rate(steps[-40:], before=steps[-41])
    windows = range(changed.step, len(steps) - _WINDOW)
    slow = [at for at in windows if _rate(steps[at : at + _WINDOW], before=steps[at - 1]) < _SETTLED * final]
    return slow[-1] + 1 - changed.step if slow else 0


def _rate(steps: Sequence[SimulatedStep], *, before: SimulatedStep) -> float:
    return sum(each.learning for each in steps) / (steps[-1].ended - before.ended)


def run_of(cell: Cell, draw: int, *, steps: int) -> tuple[SimulatedSetting, Hardware]:
    """Return a run under auto in these conditions, without a cost of lag, and its hardware."""
    engines, rollouts, law = cell.devices // 2, DEVICES[cell.devices], LENGTHS[cell.lengths]
    mean = float(np.mean(law.draw(rng.generator(0, "grid", "lengths"), 20_000)))
    rows = min(_SLOTS, math.ceil(2 * rollouts / engines))
    engine_s = rollouts * mean * _ENGINE.decode_s(rows) / (engines * rows)
    trainer_s = engine_s * SIDES[cell.side]
    shared = Contention(engine=2.0, trainer=2.0, apart=True) if cell.side == "shared" else Contention()
    hardware = Hardware(
        engine=_ENGINE,
        trainer=TrainerTimes(token_s=trainer_s / (rollouts * (mean + _PROMPT))),
        update=UpdateTimes(send_s=cell.publication * max(engine_s, trainer_s), pause_s=0.02),
        control=ControlTimes(
            order_s=0.002, request_s=1e-5, answer_s=1e-5, verify_s=0.05, deliver_s=0.005, report_s=0.02
        ),
        contention=shared,
    )
    setting = SimulatedSetting(
        steps=steps,
        engines=engines,
        slots=_SLOTS,
        bounds=MODES[AUTO],
        auto_j=True,
        on_update=OnUpdate.CONTINUE,
        rollouts_per_step=rollouts,
        group_size=_GROUP,
        lengths=law,
        prompt_tokens=_PROMPT,
        actors=max(1, engines // 16),
        groups_in_flight=4 * _SLOTS * min(engines, 16) // _GROUP,
        max_groups=8192,
        seed=draw,
    )
    return setting, hardware
