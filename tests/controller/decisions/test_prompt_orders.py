"""Prompt orders (requests for one group each) depend on seed, index and knobs; a domain's settings take precedence."""

from dataclasses import replace

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.decisions.evaluator import evaluation_order
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.types import DomainSampling, Sampling
from tests.controller.world import World, controller, problem

OWN = DomainSampling(
    group_size=6, temperature=0.5, max_tokens=9, stop=("\n",), chat_template_kwargs={"enable_thinking": False}
)
SETTINGS = replace(
    controller().settings,
    sampling=Sampling(num_samples=4, max_tokens=20, stop=("!",)),
    by_domain={"own": OWN, "other": DomainSampling()},
)


def problem_of(index):
    """Return a problem; even indices belong to the domain with its own settings."""
    return replace(problem(index), domain="own" if index % 2 == 0 else "other")


def question(index, *sets, version=0, max_tokens=0):
    plan = EvaluationPlan(sets=(*sets, EvaluationSet(problems=8, max_tokens=max_tokens)))

    def held_out(name, place):
        return replace(problem_of(place), problem_id=f"{name} {place}")

    return evaluation_order(SETTINGS, plan, index, held_out, version=version, number=1)


def test_sampling_settings_of_a_domain_override_those_of_the_run_and_the_temperature_knob():
    made = controller(evaluation_problems=0, sampling=SETTINGS.sampling, by_domain=SETTINGS.by_domain, temperature=0.9)
    made._training_problem = lambda index, *_: problem_of(index)
    own, other = World(made).begin(serves=True).orders[:2]
    assert own.sampling == Sampling(num_samples=6, temperature=0.5, max_tokens=9, stop=("\n",))
    assert other.sampling == Sampling(num_samples=4, temperature=0.9, max_tokens=20, stop=("!",))
    assert own.chat_template_kwargs == {"enable_thinking": False} and other.chat_template_kwargs == {}


def test_evaluation_requests_use_the_settings_of_the_domain_but_the_evaluation_sets_temperature():
    own, other = map(question, (0, 1))
    assert own.sampling == Sampling(num_samples=1, temperature=0.0, max_tokens=9, stop=("\n",))
    assert other.sampling == Sampling(num_samples=1, temperature=0.0, max_tokens=20, stop=("!",))
    assert own.chat_template_kwargs == {"enable_thinking": False} and other.chat_template_kwargs == {}
    assert question(0, max_tokens=5).sampling.max_tokens == 5


def test_evaluation_problem_is_sampled_the_same_regardless_of_other_evaluation_sets():
    """Only the index of the request for the problem depends on the other evaluation sets."""
    other = EvaluationSet(name="hard", place=1, problems=3, max_tokens=4, samples=6, temperature=0.5)
    joint = [question(index, other, version=2) for index in range(5)]
    assert [order.problem.problem_id for order in joint] == ["hard 0", "hard 1", "hard 2", "held_out 0", "held_out 1"]
    assert [order.order_id for order in joint][3] == "eval-2-1-000003"
    assert {order.sampling.num_samples for order in joint[:3]} == {6} and joint[0].sampling.max_tokens == 4
    alone = question(1, version=2)
    assert (alone.seed, alone.sampling, alone.problem) == (joint[4].seed, joint[4].sampling, joint[4].problem)
