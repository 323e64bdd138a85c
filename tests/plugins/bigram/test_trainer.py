"""The bigram trainer: the conformance kit, and a comparison with torch's autograd and AdamW."""

import numpy as np
import pytest
import torch

from pipelinerl.objective.presets import PRESETS, resolve
from pipelinerl.plugins.bigram.model import PARAMETER, BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import TrainerUnderTest
from trainer_contract.errors import ProtocolError, SpecError
from trainer_contract.types import Device, Head, OptimizerSpec, Precision, TrainerSpec

VOCAB = 48
CLIP = 1e-4


@pytest.fixture
def path(tmp_path):
    BigramModel.random(VOCAB, seed=2).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("head", Head)
def test_bigram_trainer_passes_the_conformance_kit(head, path, tmp_path):
    results = run(
        TrainerUnderTest(BigramTrainer, TrainerSpec(model_path=path, head=head), VOCAB), directory=tmp_path / "kit"
    )
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []


@pytest.mark.parametrize("preset", [name for name in PRESETS if not resolve(name).needs])
def test_three_bigram_trainer_steps_match_torch_adamw(preset, path, micro_batch):
    optimizer = OptimizerSpec(weight_decay=0.1, grad_clip=CLIP)
    trainer, objective = BigramTrainer(), resolve(preset)
    trainer.init_worker(TrainerSpec(model_path=path, optimizer=optimizer))
    table = torch.tensor(BigramModel.load(path).logits, dtype=torch.float64, requires_grad=True)
    adamw = torch.optim.AdamW([table], lr=0.1, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.1)
    for step in range(3):
        batch = micro_batch(seed=step)
        where = np.flatnonzero(batch.loss_mask)
        logits = (
            table[batch.token_ids[where - 1]] / torch.tensor(batch.temperatures[where], dtype=torch.float64)[:, None]
        )
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(where)), torch.tensor(batch.token_ids[where]).long()]
        columns = {
            name: torch.from_numpy(getattr(batch, name)[where]).double()
            for name in ("advantages", "weights", "behavior_logprobs")
        }
        columns |= {"loss_mask": torch.ones(len(where), dtype=torch.bool), "num_segments": batch.num_segments}
        columns["segment_ids"] = torch.from_numpy(batch.segment_ids[where])
        loss = objective.evaluate(logprobs, columns)
        adamw.zero_grad()
        loss.backward()
        norm = table.grad.norm()
        table.grad *= CLIP / norm  # not by torch's own clipping, which adds 1e-6 to the norm
        adamw.step()
        stats, stepped = trainer.backward([batch], objective)[0], trainer.optimizer_step(learning_rate=0.1)
        np.testing.assert_allclose(stats.loss, loss.item(), rtol=1e-9)
        np.testing.assert_allclose(stepped.grad_norm, norm.item(), rtol=1e-9)
        assert stepped.grad_norm > CLIP, "clipping must act, or it is not tried"
    ((name, weights),) = trainer.gather_weights()
    assert name == PARAMETER
    np.testing.assert_allclose(weights, table.detach().numpy(), rtol=1e-6)


def test_bigram_trainer_rejects_unsupported_specs_and_missing_init(path):
    for spec in ({"device": Device.CUDA}, {"precision": Precision.BF16}):
        with pytest.raises(SpecError, match="the bigram trainer runs on the CPU in fp32"):
            BigramTrainer().init_worker(TrainerSpec(model_path=path, **spec))
    with pytest.raises(SpecError, match="memory_share limits GPU memory, which the bigram trainer does not use"):
        BigramTrainer().init_worker(TrainerSpec(model_path=path, memory_share=0.4))
    with pytest.raises(ProtocolError, match="call init_worker first"):
        BigramTrainer().discard_gradient()
