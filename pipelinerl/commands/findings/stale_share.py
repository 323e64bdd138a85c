"""An estimate of the share of tokens that a recipe would drop as stale, by a short simulation."""

from __future__ import annotations

import math
from typing import Final

from pipelinerl.commands.simulation.from_recipe import setting_of
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.simulation.hardware import EngineTimes, Hardware, TrainerTimes
from pipelinerl.simulation.setting import HeavyTailedLengths
from pipelinerl.simulation.simulator import simulate

#: Number of rollouts to simulate, which takes a second or two.
_ROLLOUTS: Final = 16_000
_LEAST_STEPS: Final = 12
_MOST_STEPS: Final = 200
#: Assumed lengths of answers: a heavy-tailed distribution whose median is a quarter of the maximum.
_MEDIAN: Final = 0.25
_SIGMA: Final = 0.5


def stale_share(config: RunConfig) -> str:
    """Describe the share of tokens that would be dropped as stale in the worst case: engines slower than the trainer.

    Empty if the recipe cannot be simulated, or if it sets no staleness bound.
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
