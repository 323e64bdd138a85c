"""The shipped recipe `rlvr`: at the start each of its domains has something to learn, and none is dropped.

`python -m benchmarks rlvr` shows that the reward of each domain rises.
"""

import asyncio
from statistics import fmean

import pytest

from pipelinerl.config.recipe import load
from pipelinerl.data.problems import Split
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.runs import SandboxMissing
from pipelinerl.plugins.warmstart.tiny_decoder import sampled_answers
from pipelinerl.roles.problems import problems_of
from pipelinerl.roles.verification import open_verifier
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.live_run import launched

RLVR = load("rlvr")
GROUPS, SIZE = 16, 8


async def judged(name):
    """Let the shipped model sample groups for a domain; return the verdicts of the verifier of that domain."""
    (domain,) = (each for each in RLVR.domains if each.name == name)
    mixture = problems_of(RLVR.model_copy(update={"domains": (domain,)}), Split.VALIDATION, seed=0)
    problems = [mixture.problem(index) for index in range(GROUPS)]
    repeated = [problem for problem in problems for _ in range(SIZE)]
    model, tokenizer = load_model(RLVR.model.resolved), ChatTokenizer.load(RLVR.model.resolved)
    texts = sampled_answers(model, tokenizer, repeated, max_tokens=domain.max_tokens or 0, seed=0)
    verifier = open_verifier(domain)
    try:
        groups = [texts[place * SIZE : (place + 1) * SIZE] for place in range(GROUPS)]
        return [
            [each.verdict for each in await verifier.judge(problem, [SampledAnswer(text) for text in group])]
            for problem, group in zip(problems, groups, strict=True)
        ]
    finally:
        await verifier.close()


@pytest.mark.parametrize("name", [domain.name for domain in RLVR.domains])
def test_initial_model_gives_both_right_and_wrong_answers_in_each_rlvr_domain(name):
    if name == "programs":
        needs_a_sandbox()
    groups = asyncio.run(judged(name))
    assert all(verdict.outcome.is_judgement for group in groups for verdict in group)
    assert 0.15 < fmean(verdict.reward for group in groups for verdict in group) < 0.65
    assert sum(len({verdict.reward for verdict in group}) > 1 for group in groups) >= 0.4 * GROUPS


@pytest.mark.slow
def test_every_rlvr_domain_is_trained_on_and_judged(tmp_path):
    needs_a_sandbox()
    changes = [f"run.directory={tmp_path}", "run.steps=12", "evaluation.problems=8"]
    with launched(["rlvr", *changes], tmp_path / "rlvr") as run:
        assert run.end() == 0, run.story()
        steps = run.events("step")
        assert run.is_gone()
    assert len(steps) == 12
    share = RLVR.training.rollouts_per_step / sum(domain.weight for domain in RLVR.domains)
    for domain in RLVR.domains:
        # The first steps mostly get groups of domains with fast verifiers; over twelve steps, shares even out.
        figures = [step["by_domain"].get(domain.name, {}) for step in steps]
        assert sum(each.get("rollouts", 0) for each in figures) >= 0.7 * len(steps) * share * domain.weight, domain.name
        assert not any(each.get("stale_groups") or each.get("unjudged") for each in figures), domain.name


def needs_a_sandbox():
    try:
        probe.opened(RLVR.domains[1].oubliette.tier, at_once=1).close()
    except SandboxMissing as error:
        pytest.skip(f"left out: programs of the recipe rlvr, since {error}")
