"""Orders are functions of seed, index and knobs; a domain's own way comes before the run's, and before the knob."""

from __future__ import annotations

from pipelinerl.controller.decisions.prompt_orders import PromptOrderFactory
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.types import DomainSampling, Message, Problem, Quota, Sampling

OWN = DomainSampling(
    group_size=6, temperature=0.5, max_tokens=9, stop=("\n",), chat_template_kwargs={"enable_thinking": False}
)


def problem_of(index: int) -> Problem:
    """Those with an even index are of the domain that has its own way."""
    domain = "own" if index % 2 == 0 else "other"
    return Problem(problem_id=str(index), domain=domain, messages=(Message("user", "q"),), ground_truth="a")


def factory(max_tokens: int = 0) -> PromptOrderFactory:
    return PromptOrderFactory(
        seed=3,
        sampling=Sampling(num_samples=4, max_tokens=20, stop=("!",)),
        by_domain={"own": OWN, "other": DomainSampling()},
        evaluation=EvaluationPlan(problems=8, max_tokens=max_tokens),
        training_problem=lambda index, weights, quota: problem_of(index),
        held_out_problem=problem_of,
    )


def test_a_domain_samples_in_its_own_way_and_others_follow_the_knob() -> None:
    own, other = (factory().training(i, temperature=0.9, domain_weights={}, quota=Quota(0, 4)) for i in (0, 1))
    assert own.sampling == Sampling(num_samples=6, temperature=0.5, max_tokens=9, stop=("\n",))
    assert other.sampling == Sampling(num_samples=4, temperature=0.9, max_tokens=20, stop=("!",))
    assert own.chat_template_kwargs == {"enable_thinking": False} and other.chat_template_kwargs == {}


def test_evaluations_ask_as_the_domain_does_at_the_temperature_of_their_plan() -> None:
    own, other = (factory().asking(index, version=0, number=1) for index in (0, 1))
    assert own.sampling == Sampling(num_samples=1, temperature=0.0, max_tokens=9, stop=("\n",))
    assert other.sampling == Sampling(num_samples=1, temperature=0.0, max_tokens=20, stop=("!",))
    assert own.chat_template_kwargs == {"enable_thinking": False} and other.chat_template_kwargs == {}
    assert factory(max_tokens=5).asking(0, version=0, number=1).sampling.max_tokens == 5
