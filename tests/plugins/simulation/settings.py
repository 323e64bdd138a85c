"""Base settings and hardware for tests of the simulation, which replace single fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference_contract.weights import OnUpdate
from pipelinerl.plugins.simulation.hardware import ControlTimes, EngineTimes, Hardware, TrainerTimes, UpdateTimes
from pipelinerl.plugins.simulation.setting import HeavyTailedLengths, SimulatedSetting
from pipelinerl.staleness import StalenessBounds

#: A decode step takes 10 ms, plus 0.1 ms for each row.
ENGINE = EngineTimes(step_s=0.01, row_s=0.0001)
#: Engine and trainer are about equally fast; transfers, verification and all else take no time.
BALANCED = Hardware(engine=ENGINE, trainer=TrainerTimes(token_s=2e-4))
#: Like `BALANCED`, but transfers, verification and all else take some time.
WHOLE = replace(
    BALANCED,
    engine=replace(ENGINE, prompt_token_s=2e-5),
    update=UpdateTimes(send_s=0.05, pause_s=0.002),
    control=ControlTimes(
        order_s=0.002, request_s=0.0003, answer_s=0.0003, verify_s=0.01, verifiers=4, deliver_s=0.002, report_s=0.01
    ),
)
_HEAVY = HeavyTailedLengths(20.0, 0.9, 200)
_FIRST = SimulatedSetting(
    steps=40,
    engines=1,
    slots=64,
    bounds=StalenessBounds(1, 2),
    on_update=OnUpdate.CONTINUE,
    rollouts_per_step=64,
    group_size=8,
    lengths=_HEAVY,
    prompt_tokens=10,
)


def setting(j: int = 1, k: float = 2, **changes: Any) -> SimulatedSetting:
    """Return a run with 64 rollouts per step, heavy-tailed answer lengths, and one engine that decodes 64 rows."""
    return replace(_FIRST, bounds=StalenessBounds(j, k), **changes)
