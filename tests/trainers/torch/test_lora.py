"""Tests of LoRA in the torch trainer: conformance, equality with peft, merged weights, shared memory, resuming."""

import copy
import gc
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch import lora
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes import torch_trainers
from tests.families.zoo import packed, save
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import Learns, TrainerUnderTest
from trainer_contract.errors import SpecError, StateError
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, Head, HeadPrecision, OptimizerSpec, Precision, TrainerSpec, WeightDType

#: peft warns when it wraps a whole model.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

VOCAB = 48
OBJECTIVE = resolve("pipelinerl")
LORA = {"rank": 4, "alpha": 8}
#: Transposed layers; mixtures with a dense layer, with a router that is no plain matrix, with renamed layers.
IN_SHORT = ("gpt2", "glm4_moe", "phimoe", "laguna")
ARCHITECTURES = (
    ("qwen2", Head.VALUE),
    *(
        pytest.param(name, Head.POLICY, marks=pytest.mark.slow)
        for name in ("gpt2", "qwen2", "qwen3", "llama", "mistral")
    ),
    pytest.param("gpt2", Head.VALUE, marks=pytest.mark.slow),
)


def started(path, *, lora=LORA, **fields):
    return torch_trainers.started(path, options={"lora": dict(lora)} if lora is not None else {}, **fields)


def trained(trainer, batch, *, steps=2, rate=1e-2):
    """Take steps on one micro-batch; return the losses."""
    losses = []
    for _ in range(steps):
        losses.append(trainer.backward([batch], OBJECTIVE)[0].loss)
        trainer.optimizer_step(learning_rate=rate)
    return losses


def saved(trainer, directory):
    directory.mkdir()
    trainer.save_state(directory)
    return directory


@pytest.mark.parametrize(("name", "head"), ARCHITECTURES)
def test_lora_trainer_passes_the_conformance_kit(name, head, model_path, tmp_path):
    spec = TrainerSpec(model_path=model_path(name), device=Device.CPU, head=head, options={"lora": LORA})
    results = run(TrainerUnderTest(TorchTrainer, spec, VOCAB, Learns.ADAPTERS), directory=tmp_path)
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_twenty_lora_steps_match_a_plain_peft_loop(name, model_path, micro_batch):
    from peft import LoraConfig, get_peft_model  # imported here, so that other test processes need not import it

    optimizer = OptimizerSpec(weight_decay=0.1, grad_clip=0.5)
    trainer = started(model_path(name), optimizer=optimizer)
    model = AutoModelForCausalLM.from_pretrained(model_path(name), attn_implementation="eager").eval()
    gpt2 = name == "gpt2"
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=gpt2)
    model = get_peft_model(model, config)
    plain = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter, value in trainer._worker.trained.items():
            plain[parameter].copy_(value)
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(20):
        batch = micro_batch(seed=step)
        batch = replace(batch, weights=batch.weights / batch.weights.sum())  # normalised as in a training step
        loss = plain_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        got = trained(trainer, batch, steps=1, rate=3e-4)[0]
        assert abs(got - loss.item()) <= 1e-6, step
    assert any(value.abs().max() > 0 for n, value in trainer._worker.trained.items() if "lora_B" in n)


#: Without MiniCPM3, whose random logits are so large that every ratio is clipped, so that nothing trains.
FAMILIES = [name for name in packed("lora") if name != "minicpm3"]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in IN_SHORT else pytest.mark.slow) for each in FAMILIES]
)
def test_adapters_train_in_every_family_and_give_the_same_results_merged_and_in_peft(name, micro_batch, tmp_path):
    from peft import PeftModel

    path, batch = save(tmp_path / name, name, noise=0.3), micro_batch((9, 4, 12), tempered=False)
    trainer = started(path)
    assert trainer.weight_layout() == started(path, lora=None).weight_layout()
    before = trainer.forward([batch])[0]
    trained(trainer, batch, rate=3e-2)
    after = trainer.forward([batch])[0]
    assert np.abs(after - before).max() > 0.1
    model, state = AutoModelForCausalLM.from_pretrained(path).eval(), saved(trainer, tmp_path / "state")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), state / "adapter").eval()
    with torch.no_grad():
        for parameter, value in trainer.gather_weights():
            model.get_parameter(parameter).copy_(torch.as_tensor(value))
    for other in (model, loaded):
        np.testing.assert_allclose(plain_logprobs(other, batch), after, atol=1e-4)
    assert started(path, restore_from=state).forward([batch])[0].tobytes() == after.tobytes()


@torch.no_grad()
def plain_logprobs(model, batch):
    """Compute log-probs at temperature 1 rollout by rollout; 0 at segment starts."""
    logprobs = np.zeros(batch.num_tokens, np.float32)
    for segment in range(batch.num_segments):
        row = np.flatnonzero(batch.segment_ids == segment)
        tokens = torch.from_numpy(batch.token_ids[row]).long()
        every = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], -1)
        logprobs[row[1:]] = every.gather(1, tokens[1:, None])[:, 0]
    return logprobs


def plain_loss(model, batch):
    """Compute the objective rollout by rollout."""
    loss = torch.zeros(())
    for segment in range(batch.num_segments):
        row = np.flatnonzero(batch.segment_ids == segment)
        logits = model(input_ids=torch.from_numpy(batch.token_ids[row]).long()[None]).logits[0]
        tempered = logits[:-1] / torch.from_numpy(batch.temperatures[row[1:]])[:, None]
        logprobs = torch.log_softmax(tempered, -1)
        for place, t in enumerate(row[1:]):
            if batch.loss_mask[t]:
                logprob = logprobs[place, int(batch.token_ids[t])]
                ratio = torch.exp(logprob.detach() - float(batch.behavior_logprobs[t]))
                loss = loss - float(batch.weights[t]) * ratio * float(batch.advantages[t]) * logprob
    return loss


def test_lora_state_contains_only_adapters_and_their_moments(model_path, micro_batch, tmp_path):
    trainer, whole = started(model_path("qwen2")), started(model_path("qwen2"), lora=None)
    for each in (trainer, whole):
        trained(each, micro_batch())
    state = saved(trainer, tmp_path / "lora")
    saved(whole, tmp_path / "whole")
    assert sorted(p.name for p in state.iterdir()) == ["adapter", "optimizer.safetensors", "trainer.json"]
    names = {name.rpartition(".")[0] for name in load_file(state / "optimizer.safetensors")} - {"rng"}
    assert names == set(trainer._worker.trained)
    config = json.loads((state / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(model_path("qwen2")))


def test_lora_on_a_bf16_base_gives_the_same_bits_as_on_an_fp32_base_in_half_the_memory(
    model_path, micro_batch, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(model_path("gpt2"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    model.float().save_pretrained(tmp_path / "fp32")
    results, sizes, batch = [], [], micro_batch()
    for name in ("bf16", "fp32"):
        trainer = started(tmp_path / name, precision=Precision.BF16, gather_dtype=WeightDType.BFLOAT16)
        losses = trained(trainer, batch)
        weights = b"".join(data.tobytes() for data in copied(trainer.gather_weights()).values())
        results.append((losses, trainer.forward([batch])[0].tobytes(), weights))
        sizes.append(sum(own.nbytes for own in trainer._worker.own.values()))
    assert results[0] == results[1]
    assert sizes[0] < 0.55 * sizes[1]


def test_lora_policy_critic_and_reference_share_one_base(model_path, micro_batch):
    path, batch = model_path("qwen3"), micro_batch()
    policy, critic, reference = started(path), started(path, head=Head.VALUE), started(path)
    weights = {name: own.data_ptr() for name, own in policy._worker.own.items()}
    assert {n: own.data_ptr() for n, own in reference._worker.own.items()} == weights
    trunk = {f"model.{n}": own.data_ptr() for n, own in critic._worker.own.items() if not n.startswith("value_head")}
    assert trunk and trunk.items() <= weights.items()
    first = reference.forward([batch])[0].tobytes()
    assert first == started(path, lora=None).forward([batch])[0].tobytes(), "B is 0: it is the base"
    trained(critic, batch)
    trained(policy, batch)
    assert policy.forward([batch])[0].tobytes() != first == reference.forward([batch])[0].tobytes()
    for each in (policy, critic, reference):
        each.close()
    gc.collect()
    assert not list(lora._BASES)


def test_lora_dropout_affects_only_backward_passes_and_is_repeated_exactly_after_a_resume(
    model_path, micro_batch, tmp_path
):
    path, batch, lora = model_path("qwen2"), micro_batch(), {**LORA, "dropout": 0.5}
    trainer = started(path, lora=lora)
    trained(trainer, batch)
    forward = trainer.forward([batch])[0]
    assert forward.tobytes() == trainer.forward([batch])[0].tobytes()
    dropped = trainer.backward([batch], OBJECTIVE)[0].predictions
    assert np.abs(dropped - np.where(batch.loss_mask, forward, 0)).max() > 1e-3
    trainer.discard_gradient()
    trained(trainer, batch, steps=1)
    state = saved(trainer, tmp_path / "state")
    expected = trained(trainer, batch)
    assert trained(started(path, lora=lora, restore_from=state), batch) == expected


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 0}, r"options\.lora\.rank must be a whole number of at least 1, got 0"),
        ({"rank": 8, "ranks": 8}, r"options\.lora\.ranks is unknown to the torch trainer; it knows rank, alpha"),
        ({"alpha": 0}, r"options\.lora\.alpha must be a number above 0, got 0"),
        ({"dropout": 1.0}, r"options\.lora\.dropout must be a number at least 0 and below 1, got 1\.0"),
        ({"targets": []}, 'targets must be "all-linear" or a list'),
        (
            {"targets": ["q"]},
            "'q' matches no linear layer; linear layers of this model are down_proj, gate_proj, k_proj, o_proj",
        ),
        ({"targets": ["embed_tokens"]}, "'embed_tokens' is an embedding"),
        ({"targets": ["q_proj", "lm_head"]}, "'lm_head' is tied to the embedding"),
        (8, r"options\.lora must be a table, got 8"),
    ],
)
def test_invalid_lora_options_are_rejected(lora, sentence, model_path):
    with pytest.raises(SpecError, match=sentence):
        torch_trainers.started(model_path("qwen2"), options={"lora": lora})


@pytest.mark.parametrize(
    ("name", "target", "offered"),
    [
        ("qwen3_moe", "up_proj", "k_proj, o_proj, q_proj, v_proj"),
        ("phimoe", "router", "k_proj, o_proj, q_proj, v_proj"),
        ("gemma3", "out_proj", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_layers_that_are_no_plain_matrices_or_read_no_text_are_rejected_as_lora_targets(
    name, target, offered, tmp_path
):
    """Fused experts have no linear layers, Phi-MoE's router has another result, and a vision tower gets no gradient."""
    path = save(tmp_path / name, name)
    with pytest.raises(SpecError, match=f"'{target}' matches no linear layer; .* are {offered}$"):
        started(path, lora={"targets": [target]})
    assert started(path)._worker.loaded.adapters.record(digest="")["targets"] == offered.split(", ")


def test_fp32_output_layer_is_rejected_as_a_lora_target(model_path):
    with pytest.raises(SpecError, match=r"names the output layer, and model\.head_precision = fp32"):
        started(model_path("llama"), lora={"targets": ["lm_head"]}, head_precision=HeadPrecision.FP32)


def test_lora_trainer_rejects_states_with_other_adapters_another_base_or_without_adapters(
    model_path, micro_batch, tmp_path
):
    path, batch = model_path("qwen2"), micro_batch()
    trainer, whole = started(path, lora={"targets": ["q_proj", "v_proj"]}), started(path, lora=None)
    state = saved(trainer, tmp_path / "lora")
    refused = r"are \{ rank = 16, alpha = 32, targets = \[\"q_proj\", \"v_proj\"\] \}, but the recipe requests"
    for other in ({"rank": 8}, {"alpha": 16}, {"targets": ["q_proj"]}):
        with pytest.raises(StateError, match=refused):
            started(path, lora={"targets": ["q_proj", "v_proj"], **other}, restore_from=state)
    with pytest.raises(StateError, match=r"is of LoRA adapters; resume with trainer\.options\.lora = \{ rank = 16"):
        started(path, lora=None, restore_from=state)
    with pytest.raises(StateError, match=r"a model that was trained whole; leave trainer\.options\.lora out"):
        started(path, restore_from=saved(whole, tmp_path / "whole"))
    trained(whole, batch, steps=1)
    AutoModelForCausalLM.from_pretrained(saved(whole, tmp_path / "moved") / "model").save_pretrained(tmp_path / "base")
    with pytest.raises(StateError, match=r"another base than the weights in model\.path"):
        started(tmp_path / "base", lora={"targets": ["q_proj", "v_proj"]}, restore_from=state)
