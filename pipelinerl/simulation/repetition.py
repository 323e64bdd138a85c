"""`simulated_like`: a prediction of a run that was measured, of as many steps as that, and not of one fortunate draw.

A schedule may take dozens of steps to find its rhythm: a `drain` throws groups away until it has, and none later, or
some again after a long answer. A short run is all beginning, so that its steps are no mean over a long simulated one;
and which of its steps wait depends on the lengths that were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import tell
from pipelinerl.simulation.hardware import Hardware
from pipelinerl.simulation.prediction import Prediction
from pipelinerl.simulation.setting import SimulatedSetting
from pipelinerl.simulation.simulator import simulate

#: Simulated runs, an odd number, of which the middle one stands for all.
DRAWS: Final = 5


def simulated_like(events: Sequence[Event], setting: SimulatedSetting, hardware: Hardware) -> Prediction:
    """Of as many steps as the events tell: of runs that differ in their draws, the one whose steps last middlingly."""
    steps = len(tell(events).steps)
    runs = [simulate(replace(setting, steps=steps, seed=setting.seed + draw), hardware) for draw in range(DRAWS)]
    return sorted(runs, key=lambda run: run.step_s)[DRAWS // 2]
