"""A teacher served by a torch engine in another process gives the same log-probs and training step as a local one."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.commands.check import findings
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.engines.http.engine_teacher import EngineTeacher
from pipelinerl.errors import EngineUnreachable
from pipelinerl.rng import generator
from pipelinerl.roles.wiring import losses_of, objective_of
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.batches import batch_of
from tests.fakes.rollouts import group, rollout
from tests.fakes.standalone_engine import standalone_engine
from trainer_contract.types import Device, TrainerSpec

TEACHER = MODELS / "tiny_speller_heads32"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Yield the address of a standalone torch engine that serves the teacher."""
    with standalone_engine(TEACHER, tmp_path_factory.mktemp("teacher"), "engine.context_length=48") as (address, _):
        yield address


def batch(budget=64):
    """Return rollouts of an RL domain and of a distilled domain, at several temperatures and lengths."""
    draw, groups = generator(7, "teacher"), []
    for index, domain in enumerate(("short_words", "long_words", "long_words")):
        rollouts = []
        for reward in (0.0, 1.0, 0.0):
            prompt = draw.integers(3, 50, int(draw.integers(2, 9))).tolist()
            sampled = draw.integers(3, 50, int(draw.integers(1, 20))).tolist()
            one = rollout(reward=reward, prompt=prompt, sampled=sampled, logprob=-3.0)
            rollouts.append(replace(one, temperature=float(draw.uniform(0.5, 1.5))))
        groups.append(replace(group(index), domain=domain, rollouts=tuple(rollouts)))
    losses = losses_of(load("tiny", ['domains.long_words.loss="ref_kl"']))
    return batch_of(groups, "pipelinerl", token_budget=budget, losses=losses)


def test_teacher_engine_logprobs_equal_those_of_the_local_model(url):
    local, remote = TorchTrainer(), EngineTeacher(url)
    local.init_worker(TrainerSpec(model_path=TEACHER, device=Device.CPU))
    batches = batch().micro_batches
    assert len(batches) > 1
    for ours, theirs in zip(local.forward(batches), remote.forward(batches), strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 and ours.min() < -1.0
    local.close()
    remote.close()


def test_training_step_is_the_same_with_a_local_and_a_remote_teacher(url):
    figures = []
    for teacher in (str(TEACHER), url):
        config = load("tiny", ['domains.long_words.loss="ref_kl"', f'domains.long_words.teacher="{teacher}"'])
        objective = objective_of(config)
        step = started(config, objective, checkpoint=None)
        assert step.passes.reference is None and set(step.passes.teachers) == {"long_words"}
        figures.append(step.apply(step.accumulate(batch()), learning_rates=[1e-3]).figures)
        close_workers(step)
    here, there = figures
    assert here["kl_teacher"] == pytest.approx(there["kl_teacher"], abs=1e-5)
    assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4) and here["grad_norm"] > 1e-3
    assert "kl_reference" not in here


def test_check_command_shows_the_teachers_model_and_context(url):
    def findings_for(address, context):
        teacher = ('domains.long_words.loss="ref_kl"', f'domains.long_words.teacher="{address}"')
        config = load("tiny", [*teacher, f"engine.context_length={context}"])
        return [(part, text) for part, text in findings(config) if "teacher" in part or text.startswith("the teacher")]

    assert findings_for(url, 32) == [("teacher", f"{url} serves {TEACHER}, up to 48 tokens")]
    ((part, text),) = findings_for(url, 48)
    assert part == "warning" and text.endswith("start it with engine.context_length=49")
    ((part, text),) = findings_for("http://127.0.0.1:9", 32)
    assert part == "warning" and "does not answer now" in text


def test_error_names_the_teacher_that_cannot_answer_and_the_reason(url):
    too_long = rollout(prompt=[3] * 40, sampled=[4] * 20)
    (packed,) = batch_of([replace(group(0), rollouts=(too_long,))], "reinforce", token_budget=64).micro_batches
    for address, reason in ((url, "48"), ("http://127.0.0.1:9", "is the engine running")):
        teacher = EngineTeacher(address, timeout_s=1.5)
        with pytest.raises(EngineUnreachable, match=f"the teacher {address} gives no log-probs: .*{reason}"):
            teacher.forward([packed])
        teacher.close()
