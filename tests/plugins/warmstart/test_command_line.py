"""`pipelinerl warmstart` rejects bad input before fitting, leaves no files behind, and can stop at a given reward."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.enums import Skill
from pipelinerl.errors import UserError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.losses import policy_loss
from pipelinerl.objective.streams import CROSS_ENTROPY
from pipelinerl.plugins.warmstart.command_line import WarmStartOptions, fine_tune, make
from tests.fakes.live_run import CLI
from tests.families import zoo


def options(**changes):
    return WarmStartOptions(**{"hidden": 8, "layers": 1, "heads": 2, "band": (0.3, 0.4), "seed": 0, **changes})


def test_warmstart_does_not_overwrite_an_existing_directory(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UserError, match=f"{tmp_path} exists; name a new directory"):
        make(load("tiny"), options(), output=tmp_path, say=print)
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("trainer", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_fine_tuning_lowers_the_loss_of_demonstrations(trainer, tmp_path):
    config = load("tiny", [f"trainer.type={trainer}", "optimizer.learning_rate=2e-4", "optimizer.warmup_steps=0"])
    messages = []
    fine_tune(config, steps=8, per_step=16, validation=16, output=tmp_path / "new", say=messages.append)
    before, after = map(float, re.findall(r"validation loss ([\d.]+) before, ([\d.]+) after 8 steps", messages[-1])[0])
    assert after < 0.9 * before and messages[0].startswith(f"validation loss {before:.4f} nats")
    if trainer == "jax":
        return
    again = load("tiny", [f"model.path={tmp_path / 'new'}"])
    fine_tune(again, steps=1, validation=16, output=tmp_path / "newer", say=messages.append)
    assert f"{after:.4f} before" in messages[-1], "the saved model is the trained one"
    names = {file.name for file in config.model.resolved.iterdir()}
    assert {file.name for file in (tmp_path / "new").iterdir()} == names


def test_fine_tuned_mixture_keeps_buffers_experts_and_chat_templates(tmp_path):
    model, new, tiny = zoo.save(tmp_path / "model", "glm4_moe"), tmp_path / "new", load("tiny").model.resolved
    for file in tiny.glob("*token*.json"):
        shutil.copy(file, model)
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").write_text(settings["chat_template"])
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    config = load("tiny", [f"model.path={model}", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0"])
    fine_tune(config, steps=1, per_step=4, validation=4, output=new, say=print)
    before, after = (load_file(path / "model.safetensors") for path in (model, new))
    same = {name for name, each in after.items() if torch.equal(each, before[name])}
    assert after.keys() == before.keys() and any("experts.3.gate_proj" in name for name in before)
    assert {name for name in before if name.endswith("e_score_correction_bias")} <= same and len(same) < len(before) / 2
    template = new / "additional_chat_templates" / "tool_use.jinja"
    assert template.read_text() == "{{ messages }}" and template.stat().st_mode & 0o777 == 0o644


@pytest.mark.slow  # three processes import torch; tests/plugins/torch_mesh/test_mesh.py tests such trainers faster
def test_fine_tuning_on_two_processes_equals_fine_tuning_on_one(tmp_path):
    losses = []
    for name, overrides in (("one", []), ("two", ["trainer.options.mesh.dp_shard=2"])):
        words = [*CLI, "sft", "tiny", str(tmp_path / name), "optimizer.warmup_steps=0", *overrides]
        done = subprocess.run([*words, "--steps=2", "--demonstrations=8"], capture_output=True, text=True, check=True)
        losses.append(float(re.findall(r"([\d.]+) after 2 steps", done.stdout)[0]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_imitation_loss_is_the_mean_cross_entropy_of_all_tokens():
    logprobs, mask = np.log([[0.5, 0.25, 0.1], [0.2, 0.9, 0.9]]), np.array([[True, True, True], [True, False, False]])
    result = policy_loss(CROSS_ENTROPY, logprobs, rewards=[1.0, 1.0], groups=[0, 1], mask=mask)
    assert result.loss == pytest.approx(-logprobs[mask].mean())
    np.testing.assert_allclose(result.gradient, np.where(mask, -0.25, 0.0))


def test_fine_tuning_rejects_an_existing_output_directory_and_a_context_that_is_too_short(tmp_path):
    with pytest.raises(UserError, match="exists; name a new directory"):
        fine_tune(load("tiny"), steps=1, output=tmp_path, say=print)
    short = load("tiny").model_copy(update={"engine": load("tiny").engine.model_copy(update={"context_length": 1})})
    with pytest.raises(UserError, match=r"no demonstration has at most .*context_length = 1 tokens"):
        fine_tune(short, steps=1, output=tmp_path / "new", say=print)
    assert list(tmp_path.iterdir()) == []


def test_warmstart_rejects_an_impossible_model_shape(tmp_path):
    with pytest.raises(UserError, match="expected heads to divide hidden"):
        make(load("tiny"), options(heads=3), output=tmp_path / "new", say=print)
    assert list(tmp_path.iterdir()) == []


def two_instructions(verifier="instruction_following"):
    """Return a recipe with two instructions: one that random tokens follow, and one that they do not."""
    kinds = {"calm": "punctuation:no_comma", "loud": "change_case:english_capital"}
    domains = [
        {
            "name": name,
            "source": "instructions",
            "parameters": {"kinds": [kind], "max_instructions": 1, "sentences": 1},
            "max_tokens": 4,
            "verifier": verifier,
        }
        for name, kind in kinds.items()
    ]
    return parse(to_table(load("tiny")) | {"domains": domains})


def test_warmstart_that_stops_in_a_target_reward_range_reports_verifier_rewards_per_domain(tmp_path):
    messages = []
    wanted = options(skill=Skill.REWARD, vocab=300, band=(0.0, 1.0))
    make(two_instructions(), wanted, output=tmp_path / "new", say=messages.append)
    assert ChatTokenizer.load(tmp_path / "new").vocab_size == 300
    rewards = dict(re.findall(r"(calm|loud) ([01]\.\d+) after [1-9]", messages[-1]))
    assert float(rewards["loud"]) < 0.5 < float(rewards["calm"])


def test_warmstart_fails_if_an_answer_cannot_be_judged(tmp_path):
    (tmp_path / "mine.py").write_text("def shy(completion):\n    return None\n")
    config = two_instructions(f"{tmp_path}/mine.py:shy")
    with pytest.raises(UserError, match=r"domains\.calm: an answer could not be judged"):
        make(config, options(skill=Skill.REWARD, band=(0.0, 1.0)), output=tmp_path / "new", say=print)
    assert not (tmp_path / "new").exists()
