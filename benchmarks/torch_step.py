"""Packed micro-batches, RL steps through the trainer contract, and the reference for them: a step in plain torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_device import wait
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION, OpaquePlan
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.trainer import Trainer
from trainer_contract.types import Device, MicroBatch, Precision, TrainerSpec

CPU: Final = torch.device("cpu")
OBJECTIVE: Final = resolve("pipelinerl")


def trainer_of(
    folder: Path,
    device: torch.device = CPU,
    precision: Precision = Precision.FP32,
    *,
    kind: Callable[[], Trainer] = TorchTrainer,
    **settings: Any,
) -> Trainer:
    """Start a trainer on the model in `folder`; `settings` are further fields of `TrainerSpec`."""
    trainer = kind()
    trainer.init_worker(TrainerSpec(model_path=folder, device=Device(device.type), precision=precision, **settings))
    return trainer


def rl_step(trainer: Trainer, batch: MicroBatch, *, learning_rate: float, device: torch.device = CPU) -> float:
    """Take an RL step through the trainer contract, wait until the device has finished, and return the loss.

    Raises RuntimeError if the step changes no weight.
    """
    (stats,) = trainer.backward([batch], OBJECTIVE)
    if trainer.optimizer_step(learning_rate=learning_rate).grad_norm == 0:
        raise RuntimeError("the gradient of the step is zero")
    wait(device)
    return stats.loss


def losses(trainer: Trainer, batch: MicroBatch, *, learning_rate: float, steps: int = 3) -> NDArray[np.float64]:
    """Take some RL steps, close the trainer, and return the steps' losses."""
    taken = [rl_step(trainer, batch, learning_rate=learning_rate) for _ in range(steps)]
    trainer.close()
    gc.collect()
    return np.array(taken)


def load_model(folder: Path, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    """Return a model directory's decoder as transformers loads it, in eval mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype, **options)
    return model.eval().to(device)


def generate(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any) -> torch.Tensor:
    """Return the tokens [n, new] that Hugging Face `generate` samples in one batch, padded on the left with token 0."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    token_ids = torch.tensor([[0] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * left + [1] * (width - left) for left in padding])
    with torch.inference_mode():
        answers = model.generate(input_ids=token_ids, attention_mask=mask, max_new_tokens=max_new_tokens, **settings)
    return answers[:, width:]


def packed(
    token_ids: Sequence[Sequence[int]], prompts: Sequence[int], behavior: Sequence[NDArray[np.float32]]
) -> MicroBatch:
    """Pack sequences back to back, with random advantages.

    Sequence i begins with a prompt of `prompts[i]` tokens; `behavior[i]` has the log-probs of its other tokens.
    """
    lengths = np.array([len(each) for each in token_ids])
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    mask, tokens = positions >= np.repeat(np.asarray(prompts), lengths), int(lengths.sum())
    logprobs = np.zeros(tokens, np.float32)
    logprobs[mask] = np.concatenate(list(behavior))
    draw = generator(0, "benchmarks", "advantages")
    return MicroBatch(
        token_ids=np.concatenate([np.asarray(each) for each in token_ids]).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        loss_mask=mask,
        advantages=np.where(mask, draw.normal(size=tokens), 0.0).astype(np.float32),
        weights=np.where(mask, 1.0 / len(lengths), 0.0).astype(np.float32),
        behavior_logprobs=logprobs,
        temperatures=np.ones(tokens, np.float32),
        num_segments=len(lengths),
    )


def random_batch(lengths: Sequence[int], prompts: Sequence[int], *, vocab: int, seed: int = 0) -> MicroBatch:
    """Return a micro-batch of random tokens; segment i has `lengths[i]` tokens, the first `prompts[i]` as prompt."""
    draw, level = generator(seed, "benchmarks", "batch"), np.float32(-np.log(vocab))
    sequences = [draw.integers(0, vocab, length).tolist() for length in lengths]
    sampled = [np.full(length - prompt, level, np.float32) for length, prompt in zip(lengths, prompts, strict=True)]
    return packed(sequences, prompts, sampled)


@dataclass(frozen=True, slots=True)
class Rows:
    """A model and its batch, as padded rows (`inputs` [rows, tokens]) or as one packed row.

    `where`: row and column of each trained token. `targets`, `coefficients`, `behavior`: one entry per trained token.
    """

    model: Any
    inputs: dict[str, Any]
    where: tuple[torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    coefficients: torch.Tensor
    behavior: torch.Tensor
    autocast: Callable[[], AbstractContextManager[Any]]

    def backward(self) -> torch.Tensor:
        """Compute PipelineRL's loss in plain torch, and its gradient."""
        rows, columns = self.where
        with self.autocast():
            hidden = self.model.model(**self.inputs, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[rows, columns - 1])
        logprobs = -torch.nn.functional.cross_entropy(logits.float(), self.targets, reduction="none")
        ratio = (logprobs.detach() - self.behavior).exp()
        loss = -(self.coefficients * ratio * logprobs).sum()
        loss.backward()
        return loss


def laid_out(
    path: Path,
    batch: MicroBatch,
    *,
    device: torch.device = CPU,
    plan: Callable[[Any, torch.device], Any] | None = SegmentPlan.of,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Rows:
    """Load the model and lay out a batch for it: packed with an attention `plan`, or padded for SDPA without a plan."""
    inside = np.flatnonzero(batch.loss_mask)
    tokens = torch.from_numpy(batch.token_ids.astype(np.int64))
    rows, columns = torch.from_numpy(batch.segment_ids).long(), torch.from_numpy(batch.position_ids).long()
    if plan is not None:
        segments = OpaquePlan(plan(batch.position_ids, device))
        inputs = {"input_ids": tokens[None], "position_ids": columns[None], "segments": segments}
        where = (torch.zeros(len(inside), dtype=torch.long), torch.from_numpy(inside))
    else:
        padded = torch.zeros(batch.num_segments, int(batch.position_ids.max()) + 1, dtype=torch.long)
        attention = torch.zeros_like(padded)
        padded[rows, columns], attention[rows, columns] = tokens, 1
        inputs, where = {"input_ids": padded, "attention_mask": attention}, (rows[inside], columns[inside])
    attention_of = IMPLEMENTATION if plan is not None else "sdpa"
    return Rows(
        model=load_model(path, device, torch.float32, attn_implementation=attention_of),
        inputs={name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()},
        where=(where[0].to(device), where[1].to(device)),
        targets=tokens[inside].to(device),
        coefficients=torch.from_numpy((batch.weights * batch.advantages)[inside]).to(device),
        behavior=torch.from_numpy(batch.behavior_logprobs[inside]).to(device),
        autocast=autocast,
    )


def bare_step(rows: Rows, *, learning_rate: float) -> Callable[[], None]:
    """Return a function that takes an optimizer step in plain torch: loss, gradient, clipping, AdamW."""
    parameters = list(rows.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        rows.backward().item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()

    return step
