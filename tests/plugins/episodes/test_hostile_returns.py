"""Fuzzers of the boundaries of reward functions, verifiers and environments: hostile values mask, and end nothing."""

import asyncio
import math
from pathlib import Path

import pytest

from pipelinerl.config.domains import EpisodeSection
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.episode import Episode
from pipelinerl.plugins.episodes.group import EpisodeDomain, _verdict
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts
from pipelinerl.plugins.episodes.tool_loop import OneRequest
from pipelinerl.plugins.episodes.user_code import _messages, _step
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes import hostile_values
from tests.fakes.hostile_values import VALUES, case, expected, must_be_masked
from tests.fakes.problems import problem
from tests.fakes.talking_sampler import completion, order
from tests.fakes.verifiers import opened
from tests.patience import PATIENCE_S

CODE = Path(hostile_values.__file__).with_name("hostile_code.py")
#: The reasons name this module, or the one that makes the values.
PLACE = f"{CODE.parent}/hostile_"
# Some cases leave a coroutine behind that is never awaited.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
#: The numbers of the cases: 200 in the usual form of each test, 10⁴ in its slow form.
CASES = [range(200), pytest.param(range(10_000), marks=pytest.mark.slow)]


def check(number, verdict, place):
    """Check the verdict on one case: the right reward, or masked for a reason that names the source of the value."""
    told = (number, case(number), verdict)
    assert math.isfinite(verdict.reward) and len(verdict.reason) <= 1000, told
    assert type(verdict.reward) is float and type(verdict.reason) is str and type(verdict.answer) is str, told
    verdict.reason.encode()
    if (reward := expected(number)) is not None:
        assert (verdict.outcome.is_judgement, verdict.reward) == (True, reward), told
    if must_be_masked(number):
        assert verdict.outcome in (Outcome.VERIFIER_ERROR, Outcome.TIMEOUT), told
    if not verdict.outcome.is_judgement:  # the reason of an answer whose worker has ended names no place
        assert verdict.reward == 0 and place in verdict.reason, told


@pytest.mark.parametrize("numbers", CASES)
@pytest.mark.parametrize("name", ["score", "score_async", "Judge"])
async def test_hostile_return_of_a_reward_is_masked_with_its_place(name, numbers):
    async with asyncio.timeout(PATIENCE_S), opened(f"{CODE}:{name}", verifier_workers=1) as verifier:
        for at in range(0, len(numbers), 100):
            answers = [SampledAnswer(str(number)) for number in numbers[at : at + 100]]
            judgements = await judged(verifier, problem("x"), answers)
            for number, judgement in zip(numbers[at : at + 100], judgements, strict=True):
                check(number, judgement.verdict, PLACE)


@pytest.mark.parametrize("numbers", CASES)
async def test_hostile_return_of_an_environment_is_masked_with_its_place(numbers):
    hosts = EpisodeHosts(f"{CODE}:play")
    domain = EpisodeDomain(player=OneRequest(), limits=EpisodeSection(), verifier=None, correct_at=1.0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await hosts.start()
            pid = hosts._hosts[0].child.pid
            for at in range(0, len(numbers), 100):
                some = numbers[at : at + 100]
                episode = Episode(order(), 0, EpisodeSection())
                planned = episode.plan("main", {"messages": [{"role": "user", "content": "hello"}]})
                episode.record(planned, completion(planned.request, "a"))
                tasks = [Task(problem_id=str(number), domain="talk", messages=(), ground_truth="") for number in some]
                ends = await asyncio.gather(
                    *(hosts.play(task, base_url="http://nowhere", api_key="k", timeout_s=PATIENCE_S) for task in tasks)
                )
                for number, verdict in zip(
                    some, [await _verdict(order(), episode, end, domain) for end in ends], strict=True
                ):
                    if case(number)[0] != "value" or case(number)[1] != "none":  # None leaves the verdict to others
                        check(number, verdict, PLACE)
            assert [host.child.pid for host in hosts._hosts] == [pid], "the host has ended"
    finally:
        await hosts.close()


@pytest.mark.parametrize("name", VALUES)
def test_hostile_step_of_an_environment_is_an_error_or_has_a_finite_reward(name):
    for step in (VALUES[name](), ("x", VALUES[name](), False), ("x", 0.5, VALUES[name]())):
        try:
            made = _step(step)
        except TypeError:
            continue
        assert type(made.reward) is float and math.isfinite(made.reward) and type(made.done) is bool
    with pytest.raises(TypeError, match="as done, it is"):
        _step(("x", 1.0, "False"))
    assert _messages("x") == [{"role": "user", "content": "x"}]
