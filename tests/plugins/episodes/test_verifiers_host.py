"""Tasksets of the library `verifiers`, which runs in a separate virtual environment that slow tests first install."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.errors import PipelineError, ReferenceFailed
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts
from pipelinerl.plugins.episodes.opening import check_taskset
from pipelinerl.types import Outcome
from tests.fakes.episodes import episodes
from tests.fakes.problems import problem
from tests.fakes.talking_sampler import TalkingSampler, order, tokenizer
from tests.patience import PATIENCE_S

TASKSET = """
import verifiers.v1 as vf

class Row(vf.TaskData):
    answer: str

class Letter(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 1)

class Config(vf.TasksetConfig):
    letters: str = "ab"

class Letters(vf.Taskset[Letter, Config]):
    def load(self):
        return [
            Letter(Row(idx=number, prompt=f"write {letter}", system_prompt="be brief", answer=letter), self.config.task)
            for number, letter in enumerate(self.config.letters)
        ]

__all__ = ["Letters"]
"""

PAIR = """
class PairConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    fixed: str = ""

class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        if self.config.fixed:
            getattr(agents, self.config.fixed).trainable = False

    async def run(self, task, agents):
        await agents.writer.run(task)
        await agents.critic.run(task)

__all__ = ["Letters", "Pair"]
"""


def numbered(index, samples=1):
    return replace(order(samples=samples), problem=problem(problem_id=f"p{index}", domain="talk", index=index))


def test_python_without_the_verifiers_library_is_rejected_with_an_install_command():
    with pytest.raises(ReferenceFailed, match=r"needs environment_options.python"):
        check_taskset("letters", {})
    with pytest.raises(ReferenceFailed, match=r"has no verifiers of version 0.4; .* -m pip install"):
        check_taskset("letters", {"python": sys.executable})


@pytest.fixture(scope="module")
def verifiers_python(tmp_path_factory):
    """Return the path of a Python with `verifiers`: $VERIFIERS_PYTHON, or a newly made virtual environment."""
    if existing := os.environ.get("VERIFIERS_PYTHON"):
        return existing
    home = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    if subprocess.run([home / "bin" / "pip", "install", "-q", "verifiers>=0.4"], check=False, timeout=900).returncode:
        pytest.skip("left out: the package verifiers cannot be installed here")
    return str(home / "bin" / "python")


@pytest.fixture
def options(verifiers_python, tmp_path):
    (tmp_path / "letters.py").write_text(TASKSET)
    return {"python": verifiers_python, "path": str(tmp_path), "taskset": {"letters": "abc"}}


async def played(options, *orders):
    check_taskset("letters", options)
    hosts = EpisodeHosts("verifiers:letters", options)
    async with episodes(hosts, TalkingSampler(lambda messages: "c"), patience_s=6 * PATIENCE_S) as maker:
        return [list(await maker.make(each, GroupProgress())) for each in orders]


@pytest.mark.slow
async def test_answers_get_the_rewards_of_the_rubric_in_a_taskset_of_the_verifiers_library(options):
    wrong, right = await played(options, numbered(0), numbered(2, samples=3))
    assert [each.rollout.verdict.reward for each in wrong] == [0.5]
    assert [each.rollout.verdict.reward for each in right] == [1.5] * 3
    assert right[0].rollout.verdict.outcome is Outcome.CORRECT
    (turn,) = right[0].rollout.turns
    shown = tokenizer().decode(turn.context_token_ids.tolist())
    assert "be brief" in shown and "write c" in shown


@pytest.mark.slow
async def test_verifiers_library_environment_that_wraps_a_taskset_plays_episodes(options):
    ((made,),) = await played({**options, "id": "best_of_n", "n": 1}, numbered(2))
    assert made.rollout.verdict.reward == 1.5 and len(made.rollout.turns) == 1


@pytest.mark.slow
async def test_agents_of_a_verifiers_environment_train_under_their_own_names(options):
    (Path(str(options["path"])) / "letters.py").write_text(TASKSET + PAIR)
    ((both,),) = await played(options, numbered(2))
    assert [turn.agent for turn in both.rollout.turns] == ["writer", "critic"]
    assert both.rollout.verdict.reward == 3.0 and len(both.rollout.segments) == 2
    for changes in ({"critic": {"trains": False}}, {"fixed": "critic"}):
        ((one,),) = await played({**options, **changes}, numbered(2))
        assert [turn.agent for turn in one.rollout.turns] == ["writer"]
        assert one.rollout.verdict.reward == 1.5


@pytest.mark.slow
async def test_episodes_of_a_verifiers_taskset_share_connections(options):
    open_files = 'float(len(__import__("os").listdir("/proc/self/fd")))'
    file = Path(str(options["path"])) / "letters.py"
    file.write_text(TASKSET.replace("float(trace.last_reply == self.data.answer)", open_files))
    rewards = [made.rollout.verdict.reward for (made,) in await played(options, *[numbered(2)] * 30)]
    assert rewards[-1] - rewards[4] < 10


@pytest.mark.slow
async def test_error_names_the_missing_task_of_a_taskset_or_the_taskset_that_fails_to_load(options):
    with pytest.raises(PipelineError, match=r"has 3 tasks and no number 7; lower parameters.count to 3"):
        await played(options, numbered(7))
    with pytest.raises(PipelineError, match=r"verifiers:letters cannot be loaded by .*: ModuleNotFoundError: taskset"):
        await played({**options, "path": "/nowhere"}, numbered(0))
    file = Path(str(options["path"])) / "letters.py"
    file.write_text(TASKSET.replace("trace.last_reply ==", "trace.nothing =="))
    ((made,),) = await played(options, numbered(0))
    assert "letters.py:10: TaskError" in made.rollout.verdict.reason and "nothing" in made.rollout.verdict.reason
    file.write_text("import absent")
    with pytest.raises(PipelineError, match=r"letters.py:1: ModuleNotFoundError: No module named 'absent'"):
        await played(options, numbered(0))


@pytest.mark.slow
async def test_harness_of_the_verifiers_library_plays_episodes(options):
    if not (Path(str(options["python"])).parent / "uv").exists():
        pytest.skip("left out: harnesses of verifiers need uv in the folder of its Python")
    ((made,),) = await played({**options, "agent": {"harness": {"id": "null"}}}, numbered(2))
    assert made.rollout.verdict.reward == 1.5
