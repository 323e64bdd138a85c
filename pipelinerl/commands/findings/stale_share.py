"""An estimate of the share of tokens that a recipe would drop as stale, by a short simulation."""

from __future__ import annotations

import math
from typing import Final

from pipelinerl.commands.simulation.from_recipe import setting_of
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.simulation.hardware import EngineTimes, Hardware, TrainerTimes
from pipelinerl.simulation.lengths import HeavyTailedLengths
from pipelinerl.simulation.simulator import simulate

#: Rollouts to simulate: a second or two.
_ROLLOUTS: Final = 16_000
_LEAST_STEPS: Final = 12
_MOST_STEPS: Final = 200
#: Typical lengths of answers: the median is a quarter of the maximum, with a heavy tail.
_MEDIAN: Final = 0.25
_SIGMA: Final = 0.5


def stale_share(config: RunConfig) -> str:
    """Return a clause with the share in the worst case, where engines are the bottleneck.

    Empty if the recipe cannot be simulated, or if no group can be too old.
    """
    if math.isinf(config.staleness.bounds.k):
        return ""
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, _ROLLOUTS // config.training.rollouts_per_step))
    most = config.sampling.max_tokens
    lengths = HeavyTailedLengths(median=max(1.0, _MEDIAN * most), sigma=_SIGMA, most=most)
    hardware = Hardware(engine=EngineTimes(step_s=0.01), trainer=TrainerTimes(token_s=0.0))
    try:
        prediction = simulate(setting_of(config, lengths=lengths, prompt_tokens=0, steps=steps), hardware)
    except (RecipeError, ValueError):
        return ""
    return f"about {prediction.discarded:.0%} of the tokens dropped as stale if engines are slower than the trainer"
