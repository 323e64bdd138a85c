"""`PromptOrderFactory`: creates prompt orders, which depend only on their index, the run's seed and the live knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pipelinerl import rng
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.types import DomainSampling, IssuedAt, Problem, PromptOrder, Purpose, Sampling

_AS_THE_RUN: Final = DomainSampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrderFactory:
    """Creates prompt orders (requests for a group of rollouts, or of evaluation answers) from the run's settings.

    A domain's own group size, temperature, length and stop strings override those of the run and the knob
    `temperature`. Evaluations use the temperature of their set, and the set's length limit if it has one.
    """

    seed: int
    sampling: Sampling
    by_domain: Mapping[str, DomainSampling] = field(default_factory=dict)
    held_out_problem: Callable[[str, int], Problem]
    """Returns a held-out problem, from the name of its evaluation set and its index in the set."""

    def training(self, index: int, problem: Problem, *, temperature: float, issued_at: IssuedAt) -> PromptOrder:
        """Return training order `index`, whose samples answer `problem`."""
        own = self._own(problem)
        sampling = replace(
            self.sampling,
            num_samples=own.group_size or self.sampling.num_samples,
            temperature=temperature if own.temperature is None else own.temperature,
            max_tokens=own.max_tokens or self.sampling.max_tokens,
            stop=self._stop(own),
        )
        return PromptOrder(
            order_id=f"prompt-{index:06d}",
            index=index,
            purpose=Purpose.TRAINING,
            problem=problem,
            sampling=sampling,
            seed=rng.key(self.seed, "sampling", index),
            chat_template_kwargs=own.chat_template_kwargs,
            issued_at=issued_at,
        )

    def evaluation(
        self, plan: EvaluationPlan, index: int, *, version: int, number: int, engine: str = ""
    ) -> PromptOrder:
        """Return the order for question `index` of evaluation `number`, which evaluates `version`.

        If `engine` is given, only this engine may answer.
        """
        # Apart from id and engine, the order is the same in every evaluation, so a sample depends only on seed and
        # weights.
        evaluation_set, place = plan.question(index)
        problem = self.held_out_problem(evaluation_set.name, place)
        own = self._own(problem)
        sampling = replace(
            self.sampling,
            num_samples=evaluation_set.samples,
            temperature=evaluation_set.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=evaluation_set.max_tokens or own.max_tokens or self.sampling.max_tokens,
            stop=self._stop(own),
        )
        return PromptOrder(
            order_id=f"eval-{version}-{number}-{index:06d}",
            index=index,
            purpose=Purpose.EVALUATION,
            problem=problem,
            sampling=sampling,
            seed=rng.key(self.seed, "evaluation", place),
            engine=engine,
            chat_template_kwargs=own.chat_template_kwargs,
        )

    def _own(self, problem: Problem) -> DomainSampling:
        return self.by_domain.get(problem.domain, _AS_THE_RUN)

    def _stop(self, own: DomainSampling) -> tuple[str, ...]:
        return self.sampling.stop if own.stop is None else own.stop
