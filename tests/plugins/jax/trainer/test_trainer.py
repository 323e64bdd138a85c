"""The JAX trainer: the conformance kit, equality with the torch trainer, exactness, and one program per shape."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.objective.kl_control import as_column, with_kl_coefficient
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.plugins.jax.trainer import mesh as jax_mesh, program as jax_program, worker as jax_worker
from pipelinerl.plugins.jax.trainer.attention import Rows
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.jax_models import exported
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import TrainerUnderTest
from trainer_contract.errors import NonFiniteError, SpecError, StateError
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, Head, HeadPrecision, OptimizerSpec, Precision, Rounding, TrainerSpec

VOCAB = 48
OBJECTIVE = resolve("pipelinerl")
CRITIC = ValueLoss(clip=0.2)
JOINED = {"coordinator": "127.0.0.1:8476", "processes": 2}


def spec_of(path, **fields):
    return TrainerSpec(model_path=path, device=Device.CPU, **fields)


def started(path, trainer=JaxTrainer, **fields):
    made = trainer()
    made.init_worker(spec_of(path, **fields))
    return made


def gradients(trainer):
    worker = trainer._worker
    if isinstance(trainer, TorchTrainer):
        return {name: parameter.grad.numpy().copy() for name, parameter in worker.loaded.weights.items()}
    return exported(worker.config, worker.gradient, dtype=np.float32)


def weights(trainer):
    return {name: np.asarray(array).copy() for name, array in trainer.gather_weights()}


def largest_relative_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name]) for name in theirs)


@pytest.fixture
def compilations():
    """Record the names of the programs that XLA compiles during the test."""
    names = []

    def listen(event, _seconds, **about):
        if event.endswith("backend_compile_duration"):
            names.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_jax_trainer_passes_the_conformance_kit(model_path, tmp_path):
    results = run(TrainerUnderTest(JaxTrainer, spec_of(model_path("qwen2")), VOCAB), directory=tmp_path)
    assert [(r.name, r.reason) for r in results if r.status is Status.FAILED] == []


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3",
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "olmo3", "mistral")),
    ],
)
def test_jax_log_probs_and_gradients_match_the_torch_trainer(name, model_path, micro_batch):
    path, batch = model_path(name), micro_batch()
    ours, theirs = started(path), started(path, TorchTrainer)
    assert np.abs(ours.forward([batch])[0] - theirs.forward([batch])[0]).max() <= 1e-5
    got, expected = ours.backward([batch], OBJECTIVE)[0], theirs.backward([batch], OBJECTIVE)[0]
    np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(got.predictions, expected.predictions, atol=1e-5)
    assert largest_relative_difference(gradients(ours), gradients(theirs)) <= 2e-5


def value_directory(folder, path, batch):
    """Train a value model until its values differ between tokens; return its directory."""
    trainer = started(path, TorchTrainer, head=Head.VALUE, optimizer=OptimizerSpec(eps=1.0))
    for _ in range(3):
        trainer.backward([with_returns(batch)], CRITIC)
        trainer.optimizer_step(learning_rate=1.0)
    folder.mkdir()
    trainer.save_state(folder)
    return folder / "model"


def with_returns(batch):
    columns = np.random.default_rng(0).normal(size=(2, batch.num_tokens)).astype(np.float32)
    return replace(batch, values=columns[0] / 4, returns=columns[1])


@pytest.mark.slow
def test_jax_value_head_passes_the_conformance_kit(model_path, tmp_path):
    results = run(
        TrainerUnderTest(JaxTrainer, spec_of(model_path("qwen2"), head=Head.VALUE), VOCAB), directory=tmp_path
    )
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_jax_critic_matches_the_torch_trainer(name, model_path, micro_batch, tmp_path):
    batch = with_returns(micro_batch())
    path = value_directory(tmp_path / "saved", model_path(name), batch)
    ours, theirs = (started(path, kind, head=Head.VALUE) for kind in (JaxTrainer, TorchTrainer))
    values = theirs.forward([batch])[0]
    assert np.ptp(values) > 0.1
    assert np.abs(ours.forward([batch])[0] - values).max() <= 1e-5
    got, expected = ours.backward([batch], CRITIC)[0], theirs.backward([batch], CRITIC)[0]
    np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(got.predictions, expected.predictions, atol=1e-5)
    of_layers = {name.removeprefix("model."): gradient for name, gradient in gradients(ours).items()}
    assert largest_relative_difference(of_layers, gradients(theirs)) <= 2e-5
    state = tmp_path / "state"
    state.mkdir()
    ours.optimizer_step(learning_rate=1e-3)
    ours.save_state(state)
    again = started(path, head=Head.VALUE, restore_from=state)
    assert again.forward([batch])[0].tobytes() == ours.forward([batch])[0].tobytes()
    with pytest.raises(StateError, match="is of another model"):
        started(path, restore_from=state)


def test_new_value_head_on_a_language_model_predicts_values_of_zero(model_path, micro_batch):
    trainer, batch = started(model_path("qwen2"), head=Head.VALUE), micro_batch()
    assert not trainer.forward([batch])[0].any()
    with pytest.raises(SpecError, match="a value head has no distribution to measure, asked for "):
        trainer.backward([batch], resolve("agarwal"))


def test_twenty_jax_steps_match_the_torch_trainer(model_path, micro_batch):
    optimizer = OptimizerSpec(weight_decay=0.1, grad_clip=0.5)
    ours, theirs = (started(model_path("qwen2"), kind, optimizer=optimizer) for kind in (JaxTrainer, TorchTrainer))
    for seed in range(20):
        batch = micro_batch(seed=seed)
        losses = [trainer.backward([batch], OBJECTIVE)[0].loss for trainer in (ours, theirs)]
        steps = [trainer.optimizer_step(learning_rate=1e-3) for trainer in (ours, theirs)]
        assert abs(losses[0] - losses[1]) <= 1e-4, seed
        np.testing.assert_allclose(steps[0].grad_norm, steps[1].grad_norm, rtol=1e-4)
    assert largest_relative_difference(weights(ours), weights(theirs)) <= 1e-4


def test_jax_trainer_compiles_one_program_per_row_shape(model_path, micro_batch, compilations):
    trainer, shapes, lengths = started(model_path("llama")), set(), set()
    for number in range(1, 13):
        batch = micro_batch(lengths=tuple(range(2, 2 + number)))
        trainer.backward([batch], OBJECTIVE)
        trainer.optimizer_step(learning_rate=1e-4)
        shapes.add(Rows.of(batch.position_ids).shape)
        lengths.add(batch.num_tokens)
    assert len(lengths) == 12
    assert 1 <= compilations.count("jit(accumulate)") <= len(shapes) <= 2


@pytest.mark.parametrize(
    ("remat", "name"),
    [
        pytest.param("matmuls", "qwen2", marks=pytest.mark.slow),
        ("inference_matched", "qwen2"),
        ("inference_matched", "gemma3"),
    ],
)
def test_rematerialisation_does_not_change_gradients_or_log_probs(remat, name, model_path, micro_batch):
    path, batch, other = model_path(name), micro_batch(), micro_batch(select=[1, 3, 4])
    plain, trainer = started(path), started(path, options={"remat": remat})
    plain.backward([batch, other], OBJECTIVE)
    stats = trainer.backward([batch, other], OBJECTIVE)[0]
    assert largest_relative_difference(gradients(trainer), gradients(plain)) <= 1e-5
    # RLAX §5.1: the forward pass of a training step equals the inference forward pass.
    inside = trainer.forward([batch])[0][batch.loss_mask]
    np.testing.assert_allclose(stats.predictions[batch.loss_mask], inside, rtol=0, atol=1e-6)


def test_accumulation_and_step_need_no_second_copy_of_gradient_or_moments(model_path, micro_batch):
    worker = started(model_path("llama"), gradient_checkpointing=True)._worker
    config = replace(worker.config, hidden=256, intermediate=1024, layers=12)
    program = replace(worker.program, config=config)
    weights = {
        each.name: jax.ShapeDtypeStruct(
            each.stacked_shape, jnp.float32, sharding=jax_mesh.of_parameter(program.mesh, each)
        )
        for each in config.parameters
    }
    moments = worker.moments._replace(mu=weights, nu=weights)
    _, columns = jax_worker.laid_out(program, micro_batch())
    stepped = jax_program.step.lower(program, worker.optimizer, weights, moments, weights, np.float32(1e-3))
    accumulated = jax_program.accumulate.lower(program, OBJECTIVE, weights, weights, columns)
    size = sum(4 * array.size for array in weights.values())
    assert accumulated.compile().memory_analysis().temp_size_in_bytes < 0.5 * size
    assert stepped.compile().memory_analysis().temp_size_in_bytes < 0.1 * size


def test_changing_the_kl_coefficient_compiles_no_program(model_path, micro_batch, compilations):
    trainer, batch, objective = started(model_path("llama")), micro_batch(), resolve("grpo_kl")
    batch = replace(batch, ref_logprobs=1.1 * trainer.forward([batch])[0])

    def loss_at(beta):
        compiled, coefficient = as_column(with_kl_coefficient(objective, beta))
        given = replace(batch, kl_coefficients=np.full(batch.num_tokens, coefficient, np.float32))
        return trainer.backward([given], compiled)[0].loss

    first = [loss_at(0.04), loss_at(0.04)]
    compilations.clear()
    others = [loss_at(0.05), loss_at(0.4)]
    assert compilations == []
    assert first[0] == first[1] < others[0] < others[1]
    penalty = (others[1] - first[0]) / (0.4 - 0.04)
    np.testing.assert_allclose(others[0] - first[0], 0.01 * penalty, rtol=1e-3)


def test_forward_at_with_earlier_weights_compiles_no_further_program(model_path, micro_batch, compilations):
    trainer, batch, history = started(model_path("llama")), micro_batch(), []
    for _ in range(3):
        history.append((copied(trainer.gather_weights()), trainer.forward([batch])[0]))
        trainer.backward([batch], OBJECTIVE)
        trainer.optimizer_step(learning_rate=1e-2)
    compilations.clear()
    for held, expected in history[::-1]:
        assert trainer.forward_at([batch], held)[0].tobytes() == expected.tobytes()
    assert compilations == []


def remats(jaxpr):
    """Yield the checkpoint policy of each rematerialised part of a jaxpr, also of nested parts."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("remat"):
            yield equation.params["policy"]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from remats(inner)


@pytest.mark.parametrize("precision", [Precision.BF16, pytest.param(Precision.FP32, marks=pytest.mark.slow)])
def test_training_forward_matches_inference_bit_for_bit(precision, model_path, micro_batch):
    """No layer saves residuals, so XLA compiles the same forward pass for training and inference (RLAX §5.1)."""
    trainer, batch = started(model_path("qwen2"), gradient_checkpointing=True, precision=precision), micro_batch()
    worker, inside = trainer._worker, batch.loss_mask
    _, columns = jax_worker.laid_out(worker.program, batch)
    forward = jax.make_jaxpr(jax_program.logprobs, static_argnums=0)(worker.program, worker.weights, columns)
    assert list(remats(forward.jaxpr)) == 2 * [jax.checkpoint_policies.nothing_saveable], "the layers, and the head"
    evaluated = trainer.backward([batch], OBJECTIVE)[0].predictions[inside]
    assert trainer.forward([batch])[0][inside].tobytes() == evaluated.tobytes()
    assert trainer.forward_at([batch], copied(trainer.gather_weights()))[0][inside].tobytes() == evaluated.tobytes()


@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 2, "tensor": 2}, pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_computing_logits_in_pieces_gives_the_same_log_probs_and_gradients(mesh, model_path, micro_batch, compilations):
    """Backward skips pieces without tokens in the loss, with one program; forward skips those without predictions."""
    path, batch = model_path("qwen2"), micro_batch(lengths=(60, 9, 4, 40, 2, 17, 9, 50, 33))
    whole, pieces = started(path), started(path, options={"mesh": mesh}, gradient_checkpointing=True)
    pieces._worker.program = replace(pieces._worker.program, logits_at_once=10 * VOCAB)
    forward = pieces.forward([batch])[0]
    np.testing.assert_allclose(forward, whole.forward([batch])[0], atol=1e-6)
    for part in (batch, replace(batch, loss_mask=batch.loss_mask & (batch.position_ids > 30))):
        ours, theirs = (trainer.backward([part], OBJECTIVE)[0] for trainer in (pieces, whole))
        assert ours.predictions[part.loss_mask].tobytes() == forward[part.loss_mask].tobytes()
        assert not ours.predictions[~part.loss_mask].any()
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
        assert largest_relative_difference(gradients(pieces), gradients(whole)) <= 1e-5
    assert compilations.count("jit(accumulate)") <= 2, "one for each trainer"


def test_bf16_trainer_is_close_to_fp32_and_keeps_fp32_weights(model_path, micro_batch):
    path, batch = model_path("qwen2"), micro_batch(tempered=False)
    exact = started(path).forward([batch])[0]
    trainer = started(path, precision=Precision.BF16)
    assert 0 < np.abs(trainer.forward([batch])[0] - exact).max() < 0.5
    trainer.backward([batch], OBJECTIVE)
    trainer.optimizer_step(learning_rate=1e-3)
    assert {str(array.dtype) for array in trainer._worker.weights.values()} == {"float32"}


@pytest.mark.parametrize(
    ("head", "rounding"), [(HeadPrecision.MODEL, Rounding.NEAREST), (HeadPrecision.FP32, Rounding.DITHERED)]
)
def test_forward_and_backward_in_jax_use_the_rounded_weights_that_engines_serve(
    model_path, tmp_path, micro_batch, head, rounding
):
    path = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(model_path("qwen2"), dtype=torch.bfloat16).save_pretrained(path)
    trainer, batch = started(path, head_precision=head, rounding=rounding), micro_batch()
    trainer.backward([batch], OBJECTIVE)
    trainer.optimizer_step(learning_rate=1e-3)
    served = copied(trainer.gather_weights())
    assert {info.dtype for info in trainer.weight_layout()} == {"bfloat16"}
    (got,) = trainer.forward([batch])
    np.testing.assert_array_equal(got, trainer.forward_at([batch], served)[0])
    (stats,) = trainer.backward([batch], OBJECTIVE)
    np.testing.assert_allclose(stats.predictions[batch.loss_mask], got[batch.loss_mask], rtol=0, atol=1e-5)


def test_overflowing_gradient_is_cleared_and_weights_stay_unchanged(model_path, micro_batch):
    trainer = started(model_path("qwen2"))
    before = weights(trainer)
    trainer.backward([micro_batch()], OBJECTIVE)
    trainer._worker.gradient["model.norm.weight"] *= jnp.inf
    with pytest.raises(NonFiniteError, match="cleared and the weights are unchanged"):
        trainer.optimizer_step(learning_rate=1e-2)
    assert trainer.model_version == 0
    assert all(np.array_equal(before[name], array) for name, array in weights(trainer).items())


def test_trainer_state_of_another_model_or_format_is_rejected(model_path, tmp_path):
    started(model_path("qwen2")).save_state(tmp_path)
    with pytest.raises(StateError, match="of another model than model_path"):
        started(model_path("llama"), restore_from=tmp_path)
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(StateError, match="has format 99, expected 1"):
        started(model_path("qwen2"), restore_from=tmp_path)


def test_altered_byte_in_a_trainer_state_is_detected(model_path, tmp_path):
    started(model_path("qwen2")).save_state(tmp_path)
    part = next(file for file in (tmp_path / "arrays" / "mean").rglob("c/*") if file.is_file())
    content = bytearray(part.read_bytes())
    content[3] ^= 1
    part.write_bytes(content)
    with pytest.raises(StateError, match=r"the array mean/.* is missing or damaged"):
        started(model_path("qwen2"), restore_from=tmp_path)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"options": {"mush": 1}}, "options.mush is unknown to the JAX trainer; it knows mesh, remat, attention"),
        ({"options": {"mesh": {"rows": 2}}}, "options.mesh.rows is unknown"),
        ({"options": {"mesh": {"fsdp": 0}}}, "options.mesh.fsdp must be a whole number of at least 1, got 0"),
        ({"options": {"mesh": 2}}, "options.mesh must be a table, got 2"),
        ({"options": {"remat": "some"}}, "options.remat must be one of none, matmuls, inference_matched, got 'some'"),
        ({"options": {"attention": "sparse"}}, "options.attention must be one of dense, splash, got 'sparse'"),
        ({"options": {"attention": "splash"}}, '"splash" is a kernel for TPUs, got cpu'),
        ({"options": {"mesh": {"tensor": 4}}}, "tensor=4 does not divide the model's 2 key-value heads"),
        ({"options": {"mesh": {"fsdp": 5}}}, r"fsdp=5 does not divide the 32 of 'model.embed_tokens.weight'"),
        ({"options": {"mesh": {"data": 3}}}, "makes 3 devices, which must divide the"),
        ({"options": {"distributed": JOINED | {"process": -1}}}, "options.distributed.process must be a whole number"),
        ({"options": {"distributed": {}}}, "options.distributed must have coordinator and processes, as in"),
        ({"options": {"distributed": JOINED | {"coordinator": "here"}}}, "coordinator must be host:port, got 'here'"),
        ({"options": {"distributed": JOINED | {"process": 2}}}, "process must be below processes=2, got 2"),
        ({"options": {"distributed": JOINED | {"coordinator": "10.0.0.1:1"}}}, "token_file must be given where"),
        ({"options": {"distributed": JOINED | {"process": 1}}}, "only rank 0 is a trainer; start `pipelinerl trainer-"),
        ({"device": Device.CUDA}, "device is cuda, but jax finds none"),
    ],
)
def test_jax_trainer_rejects_unsatisfiable_specs(fields, sentence, model_path):
    with pytest.raises(SpecError, match=sentence):
        JaxTrainer().init_worker(replace(spec_of(model_path("qwen2")), **fields))


@pytest.mark.parametrize(("name", "sentence"), [("gpt2", "'gpt2' is not supported")])
def test_jax_trainer_rejects_unsupported_architectures(name, sentence, model_path):
    with pytest.raises(SpecError, match=sentence):
        started(model_path(name))
