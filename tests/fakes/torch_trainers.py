"""Torch trainers on the CPU, their gradients, and a plain computation of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, MicroBatch, TrainerSpec


def spec_of(path: Path, **fields: Any) -> TrainerSpec:
    return TrainerSpec(model_path=path, device=Device.CPU, **fields)


def started(path: Path, **fields: Any) -> TorchTrainer:
    trainer = TorchTrainer()
    trainer.init_worker(spec_of(path, **fields))
    return trainer


def gradients(trainer: TorchTrainer) -> dict[str, Tensor]:
    named = trainer._worker.loaded.weights.items()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def padded_twin(path: Path, batch: MicroBatch) -> tuple[float, np.ndarray, dict[str, Tensor]]:
    """Compute loss and gradients plainly: one padded batch, eager attention, full logits, a loop over rollouts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    rows = [np.flatnonzero(batch.segment_ids == segment) for segment in range(batch.num_segments)]
    width = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.from_numpy(batch.token_ids[row]).long()
        attention[i, : len(row)] = 1
    logits = model(input_ids=tokens, attention_mask=attention).logits
    loss, everything = torch.zeros(()), np.zeros(batch.num_tokens, dtype=np.float32)
    for i, row in enumerate(rows):
        for place, t in enumerate(row[1:], start=1):
            z = logits[i, place - 1] / float(batch.temperatures[t])
            logprob = torch.log_softmax(z, -1)[int(batch.token_ids[t])]
            everything[t] = logprob.item()
            if batch.loss_mask[t]:
                ratio = torch.exp(logprob.detach() - float(batch.behavior_logprobs[t]))
                loss = loss - float(batch.weights[t]) * ratio * float(batch.advantages[t]) * logprob
    loss.backward()
    return loss.item(), everything, {name: p.grad for name, p in model.named_parameters()}
