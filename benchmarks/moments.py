"""What AdamW loses when its moments are kept in bf16: a tiny decoder, trained on a fixed run.

    bf16, nearest       both moments rounded to the nearest after each step
    bf16 mean           the first moment alone, to the nearest
    bf16, at random     `trainer.options.optimizer.moments = "bf16"`

Each goes the same steps over the same rollouts, with advantages that a fixed rule gives, so that nothing but the
moments differs. Told are the loss at the end, and how far weights lie from those of fp32 moments, over how far these
went from where they began; also after a spike, three steps whose gradients are a hundred times as large: with beta2 =
0.999 a second moment that is rounded to the nearest never falls again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Row, print_table, write_record
from pipelinerl.models.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, MicroBatch, OptimizerSpec, TrainerSpec

_RATE: Final = 1e-3
_ROLLOUTS, _LENGTH, _VOCAB = 16, 24, 512
_PROMPT: Final = 4
#: That of the demonstration, with a vocabulary to draw from.
_SHAPE: Final = DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=192, vocab=_VOCAB)
#: beta2, and by how much the gradients of the first steps are greater than those that follow.
_RUNS: Final = ((0.95, 1.0), (0.999, 1.0), (0.999, 100.0))
_SPIKE_STEPS: Final = 3


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    steps = 30 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        random_decoder(_SHAPE, seed=0).save_pretrained(path)
        found = {
            f"beta2 {beta}{', after a spike' if spike > 1 else ''}": _compared(path, beta, spike, steps)
            for beta, spike in _RUNS
        }
    rows = [
        Row(f"{beta}, {arm}: loss, weights apart", f"{its['loss']:.4f}, {its['apart']:.3g}")
        for beta, arms in found.items()
        for arm, its in arms.items()
    ]
    print_table(f"{steps} steps with moments in bf16", rows)
    write_record("moments", {"quick": quick, "steps": steps, **found})
    return found


def _compared(path: Path, beta: float, spike: float, steps: int) -> dict[str, dict[str, float]]:
    arms: Mapping[str, tuple[dict[str, Any], Callable[[TorchTrainer], None]]] = {
        "fp32": ({}, lambda _: None),
        "bf16, nearest": ({}, lambda trainer: _round(trainer, "exp_avg", "exp_avg_sq")),
        "bf16 mean": ({}, lambda trainer: _round(trainer, "exp_avg")),
        "bf16, at random": ({"optimizer": {"moments": "bf16"}}, lambda _: None),
    }
    trained = {name: _trained(path, beta, spike, steps, options, after) for name, (options, after) in arms.items()}
    began = _weights(_started(path, beta, {}))
    exact = trained["fp32"][1]
    moved = _distance(exact, began)
    return {name: {"loss": loss, "apart": _distance(each, exact) / moved} for name, (loss, each) in trained.items()}


def _trained(
    path: Path,
    beta: float,
    spike: float,
    steps: int,
    options: dict[str, Any],
    after: Callable[[TorchTrainer], None],
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss over the last tenth of the steps, and the weights."""
    trainer, objective, losses = _started(path, beta, options), resolve("pipelinerl"), []
    for step in range(steps):
        scale = spike if step < _SPIKE_STEPS else 1.0
        losses.append(trainer.backward([_batch(step, scale)], objective)[0].loss)
        trainer.optimizer_step(learning_rate=_RATE)
        after(trainer)
    return float(np.mean(losses[-max(1, steps // 10) :])), _weights(trainer)


def _started(path: Path, beta: float, options: dict[str, Any]) -> TorchTrainer:
    trainer = TorchTrainer()
    optimizer = OptimizerSpec(betas=(0.9, beta), grad_clip=0.0)
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, optimizer=optimizer, options=options))
    return trainer


def _round(trainer: TorchTrainer, *moments: str) -> None:
    worker: Any = trainer._worker
    for state in worker.optimizer.state.values():
        for name in moments:
            state[name].copy_(state[name].bfloat16())


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.gather_weights()}


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return float(sum(float(((one[name] - other[name]).double() ** 2).sum()) for name in one) ** 0.5)


def _batch(step: int, scale: float) -> MicroBatch:
    """Rollouts whose tokens repeat their prompt or do not; those that do have an advantage of `scale`."""
    draw = generator(0, "moments", step)
    prompts = draw.integers(6, _VOCAB, (_ROLLOUTS, _PROMPT))
    copies = np.tile(prompts, (1, _LENGTH // _PROMPT))
    noise = draw.integers(6, _VOCAB, copies.shape)
    good = np.arange(_ROLLOUTS) % 2 == 0
    tokens = np.where(good[:, None], copies, noise)
    tokens[:, :_PROMPT] = prompts
    positions = np.tile(np.arange(_LENGTH), _ROLLOUTS).astype(np.int32)
    mask = positions >= _PROMPT
    count = len(positions)
    advantages = np.repeat(np.where(good, scale, 0.0), _LENGTH)
    return MicroBatch(
        token_ids=tokens.reshape(-1).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(_ROLLOUTS), _LENGTH).astype(np.int32),
        loss_mask=mask,
        advantages=np.where(mask, advantages, 0.0).astype(np.float32),
        weights=(mask / mask.sum()).astype(np.float32),
        behavior_logprobs=np.where(mask, -np.log(_VOCAB), 0.0).astype(np.float32),
        temperatures=np.ones(count, np.float32),
        num_segments=_ROLLOUTS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    run(quick=parser.parse_args().quick)
