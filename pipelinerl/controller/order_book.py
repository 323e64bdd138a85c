"""`OrderBook`: writes prompt orders. Each is a pure function of the run's seed, its index and the live knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from pipelinerl import rng
from pipelinerl.types import Problem, PromptOrder, Purpose, Sampling


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBook:
    """What orders are written from."""

    seed: int
    sampling: Sampling
    evaluation_max_tokens: int
    training_problem: Callable[[int, Mapping[str, float]], Problem]
    held_out_problem: Callable[[int], Problem]

    def training(self, index: int, *, temperature: float, domain_weights: Mapping[str, float]) -> PromptOrder:
        """Training order `index`, from the mixture of these weights."""
        return PromptOrder(
            order_id=f"prompt-{index:06d}",
            index=index,
            purpose=Purpose.TRAINING,
            problem=self.training_problem(index, domain_weights),
            sampling=replace(self.sampling, temperature=temperature),
            seed=rng.key(self.seed, "sampling", index),
        )

    def evaluation(self, index: int, *, version: int) -> PromptOrder:
        """Held-out problem `index`, greedily, for the evaluation that begins at `version`."""
        sampling = replace(
            self.sampling, num_samples=1, temperature=0.0, top_p=1.0, top_k=0, max_tokens=self.evaluation_max_tokens
        )
        return PromptOrder(
            order_id=f"eval-{version}-{index:06d}",
            index=index,
            purpose=Purpose.EVALUATION,
            problem=self.held_out_problem(index),
            sampling=sampling,
            seed=rng.key(self.seed, "evaluation", index),
        )
