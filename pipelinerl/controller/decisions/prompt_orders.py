"""`PromptOrderFactory`: writes prompt orders, each a pure function of the run's seed, its index and the live knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from pipelinerl import rng
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.types import Problem, PromptOrder, Purpose, Quota, Sampling


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrderFactory:
    """What orders are written from."""

    seed: int
    sampling: Sampling
    evaluation: EvaluationPlan
    training_problem: Callable[[int, Mapping[str, float], Quota], Problem]
    held_out_problem: Callable[[int], Problem]

    def training(
        self, index: int, *, temperature: float, domain_weights: Mapping[str, float], quota: Quota
    ) -> PromptOrder:
        """Training order `index`, from the mixture of these weights, which hold within the quota's blocks."""
        return PromptOrder(
            order_id=f"prompt-{index:06d}",
            index=index,
            purpose=Purpose.TRAINING,
            problem=self.training_problem(index, domain_weights, quota),
            sampling=replace(self.sampling, temperature=temperature),
            seed=rng.key(self.seed, "sampling", index),
        )

    def asking(self, index: int, *, version: int, number: int, engine: str = "") -> PromptOrder:
        """Held-out problem `index` for evaluation `number`, that of `version`; an `engine` that is named answers alone.

        Equal at each asking but for its id and engine: a sample is a function of its seed and of the weights.
        """
        plan = self.evaluation
        sampling = replace(
            self.sampling,
            num_samples=plan.samples,
            temperature=plan.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=plan.max_tokens,
        )
        return PromptOrder(
            order_id=f"eval-{version}-{number}-{index:06d}",
            index=index,
            purpose=Purpose.EVALUATION,
            problem=self.held_out_problem(index),
            sampling=sampling,
            seed=rng.key(self.seed, "evaluation", index),
            engine=engine,
        )
