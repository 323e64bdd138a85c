"""Equal gradients and states on every mesh, on simulated CPU devices (see tests/conftest.py)."""

import jax
import numpy as np
import pytest

from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.jax.decoder import place_weights
from pipelinerl.plugins.jax.trainer import program as jax_program
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from tests.fakes.jax_models import exported
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import TrainerUnderTest
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, TrainerSpec

OBJECTIVE = resolve("pipelinerl")
ONE = {}
MESHES = [{"fsdp": 2}, {"fsdp": 2, "tensor": 2}]
MORE_MESHES = [{"data": 2}, {"tensor": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 4}]


def started(path, mesh, **fields):
    trainer = JaxTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, options={"mesh": mesh}, **fields))
    return trainer


def stepped(trainer, batch):
    loss = trainer.backward([batch], OBJECTIVE)[0].loss
    gradient = exported(trainer._worker.config, trainer._worker.gradient, dtype=np.float32)
    return loss, gradient, trainer.optimizer_step(learning_rate=1e-2).grad_norm


def check_mesh(path, mesh, batch):
    (loss, gradient, norm), (loss_one, expected, norm_one) = (stepped(started(path, m), batch) for m in (mesh, ONE))
    np.testing.assert_allclose((loss, norm), (loss_one, norm_one), rtol=1e-5)
    for name, right in expected.items():
        assert np.linalg.norm(gradient[name] - right) <= 1e-5 * np.linalg.norm(right), name


@pytest.mark.parametrize("mesh", [pytest.param(MESHES[0], marks=pytest.mark.slow), *MESHES[1:]], ids=str)
def test_jax_gradient_does_not_depend_on_the_mesh(mesh, model_path, micro_batch):
    check_mesh(model_path("qwen3"), mesh, micro_batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
@pytest.mark.parametrize("mesh", [*MESHES, *MORE_MESHES], ids=str)
def test_jax_gradient_does_not_depend_on_the_mesh_for_qwen2_and_llama(name, mesh, model_path, micro_batch):
    check_mesh(model_path(name), mesh, micro_batch())


def test_forward_at_shards_the_given_weights_like_the_trainers_own_weights(model_path, micro_batch):
    trainer, batch = started(model_path("qwen3"), {"fsdp": 2, "tensor": 2}), micro_batch()
    before, expected = copied(trainer.gather_weights()), trainer.forward([batch])[0]
    trainer._worker.weights = own = {name: 1.1 * array for name, array in trainer._worker.weights.items()}
    placed = place_weights(trainer._worker.config, copied(trainer.gather_weights()).__getitem__, like=own)
    assert all(placed[name].sharding == own[name].sharding and (placed[name] == own[name]).all() for name in own)
    assert np.abs(trainer.forward([batch])[0] - expected).max() > 1e-2
    assert trainer.forward_at([batch], before)[0].tobytes() == expected.tobytes()


@pytest.mark.slow
def test_jax_trainer_on_a_mesh_passes_the_conformance_kit(model_path, tmp_path):
    spec = TrainerSpec(model_path=model_path("qwen3"), device=Device.CPU, options={"mesh": {"fsdp": 2, "tensor": 2}})
    results = run(TrainerUnderTest(JaxTrainer, spec, 48), directory=tmp_path)
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []


def test_jax_weights_moments_and_newly_zeroed_gradients_are_sharded_over_the_mesh(model_path):
    worker = started(model_path("qwen3"), {"fsdp": 2, "tensor": 2})._worker
    name = "model.layers.*.mlp.gate_proj.weight"
    for array in (worker.weights[name], worker.moments.mu[name], jax_program.zeros(worker.weights)[name]):
        assert len(array.sharding.device_set) == 4
        assert array.sharding.shard_shape(array.shape) == (2, 24, 16)


def test_jax_state_is_restored_exactly_on_the_mesh_that_saved_it_and_on_another_mesh(model_path, micro_batch, tmp_path):
    path, mesh, batch = model_path("qwen3"), {"fsdp": 2}, micro_batch()
    saved = started(path, mesh)
    stepped(saved, batch)
    saved.save_state(tmp_path)
    parts = list((tmp_path / "arrays/weights/model.embed_tokens.weight").rglob("c/*/*"))
    assert len(parts) == 2, "each device's part is a file of its own"
    same, other = (started(path, m, restore_from=tmp_path) for m in (mesh, {"fsdp": 2, "tensor": 2}))
    for restored in (same, other):
        assert restored.model_version == 1
        ours, theirs = ((trainer._worker.weights, trainer._worker.moments) for trainer in (restored, saved))
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    expected, exact, near = (stepped(trainer, micro_batch(seed=1)) for trainer in (saved, same, other))
    assert (exact[0], exact[2]) == (expected[0], expected[2])
    assert all(np.array_equal(exact[1][name], gradient) for name, gradient in expected[1].items())
    np.testing.assert_allclose((near[0], near[2]), (expected[0], expected[2]), rtol=1e-6)
