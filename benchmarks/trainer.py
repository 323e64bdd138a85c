"""What the trainer costs over bare torch, and what packing saves.

- An RL step (forward, backward, clipping, AdamW) through `TorchTrainer` against a plain torch loop on the same packed
  batch: the same model, attention and optimizer, with tensors made ready beforehand and the loss written out.
- The same ragged batch packed and padded, both through transformers' SDPA on plain tensors otherwise; their gradients
  must agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.measure import Row, paired, print_table, seconds_of, write_record
from pipelinerl.models.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, MicroBatch, TrainerSpec

SHAPE = DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=176, vocab=64, max_positions=512)
PROMPT = 8
RATE = 1e-4

Ints = NDArray[np.int64]


def ragged_batch(lengths: Ints, *, seed: int) -> MicroBatch:
    """Random rollouts of these lengths behind prompts of `PROMPT` tokens."""
    draw, totals = generator(seed, "trainer_benchmark"), lengths + PROMPT
    positions = np.concatenate([np.arange(total) for total in totals]).astype(np.int32)
    mask, tokens = positions >= PROMPT, int(totals.sum())
    return MicroBatch(
        token_ids=draw.integers(0, SHAPE.vocab, tokens).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(lengths)), totals).astype(np.int32),
        loss_mask=mask,
        advantages=np.where(mask, draw.normal(size=tokens), 0.0).astype(np.float32),
        weights=np.where(mask, 1.0 / len(lengths), 0.0).astype(np.float32),
        behavior_logprobs=np.where(mask, -np.log(SHAPE.vocab), 0.0).astype(np.float32),
        temperatures=np.ones(tokens, dtype=np.float32),
        num_segments=len(lengths),
    )


def load(path: Path, attention: str) -> Any:
    """The model as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch laid out as rows [R, L], padded at the end, or as one packed row; `where` picks what trains."""

    model: Any
    inputs: dict[str, Any]
    where: tuple[torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    coefficients: torch.Tensor
    behavior: torch.Tensor

    def backward(self) -> torch.Tensor:
        """PipelineRL's loss written out, and its gradient."""
        hidden = self.model.model(**self.inputs, use_cache=False).last_hidden_state
        rows, columns = self.where
        logits = self.model.lm_head(hidden[rows, columns - 1])
        logprobs = -torch.nn.functional.cross_entropy(logits, self.targets, reduction="none")
        ratio = (logprobs.detach() - self.behavior).exp()
        loss = -(self.coefficients * ratio * logprobs).sum()
        loss.backward()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Of one backward, cleared afterwards."""
        self.backward()
        found = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.model.zero_grad()
        return found


def laid_out(path: Path, batch: MicroBatch, *, packed: bool) -> Rows:
    """The batch for one arm."""
    inside = np.flatnonzero(batch.loss_mask)
    if packed:
        tokens = torch.from_numpy(batch.token_ids.astype(np.int64))[None]
        inputs: dict[str, Any] = {"position_ids": torch.from_numpy(batch.position_ids.astype(np.int64))[None]}
        inputs["segments"] = SegmentPlan.of(batch.position_ids, torch.device("cpu"))
        where = (torch.zeros(len(inside), dtype=torch.long), torch.from_numpy(inside))
    else:
        tokens = torch.zeros(batch.num_segments, int(batch.position_ids.max()) + 1, dtype=torch.long)
        attention = torch.zeros_like(tokens)
        rows, columns = torch.from_numpy(batch.segment_ids).long(), torch.from_numpy(batch.position_ids).long()
        tokens[rows, columns] = torch.from_numpy(batch.token_ids).long()
        attention[rows, columns] = 1
        inputs, where = {"attention_mask": attention}, (rows[inside], columns[inside])
    return Rows(
        model=load(path, IMPLEMENTATION if packed else "sdpa"),
        inputs={"input_ids": tokens, **inputs},
        where=where,
        targets=torch.from_numpy(batch.token_ids[inside]).long(),
        coefficients=torch.from_numpy((batch.weights * batch.advantages)[inside]),
        behavior=torch.from_numpy(batch.behavior_logprobs[inside]),
    )


def bare_step(path: Path, batch: MicroBatch) -> Callable[[], None]:
    """A step in plain torch, with everything prepared."""
    rows = laid_out(path, batch, packed=True)
    optimizer = torch.optim.AdamW(rows.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        rows.backward().item()
        torch.nn.utils.clip_grad_norm_(rows.model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer_step(path: Path, batch: MicroBatch) -> Callable[[], None]:
    """A step through the contract, statistics included."""
    trainer, objective = TorchTrainer(), resolve("pipelinerl")
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))

    def step() -> None:
        trainer.backward([batch], objective)
        trainer.optimizer_step(learning_rate=RATE)

    return step


def run(quick: bool = False) -> None:
    """Measure, print, record."""
    rounds = 8 if quick else 30
    short = ragged_batch(generator(0, "short").integers(4, 25, 256), seed=1)
    # Completions as RL sees them: most are short, a few reach the limit.
    long = ragged_batch(np.minimum(generator(0, "long").geometric(1 / 40, 48) + 4, 300), seed=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        random_decoder(SHAPE, seed=0).save_pretrained(path)
        trainer, bare = trainer_step(path, short), bare_step(path, short)
        overhead = paired({"trainer": seconds_of(trainer), "bare": seconds_of(bare)}, rounds, warmup=3)
        packed, padded = laid_out(path, long, packed=True), laid_out(path, long, packed=False)
        pairs = list(zip(packed.gradients(), padded.gradients(), strict=True))
        scale = max(float(b.abs().max()) for _, b in pairs)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        arms = {"packed": seconds_of(packed.backward), "padded": seconds_of(padded.backward)}
        packing = paired(arms, rounds, warmup=2)
    throughput, speed_up = overhead.ratio("bare", "trainer"), packing.ratio("padded", "packed")
    padding = long.num_segments * (int(long.position_ids.max()) + 1) / long.num_tokens
    rows = [
        Row("trainer / bare torch, throughput", throughput, ">= 0.90 (goal 0.98)", throughput.median >= 0.90),
        Row("packed / padded, speed-up", speed_up, "> 1", speed_up.low > 1.0),
        Row("padded tokens / tokens", padding),
        Row("largest difference of gradients, relative", difference / scale, "<= 1e-5", difference / scale <= 1e-5),
    ]
    print_table("trainer", rows)
    write_record(
        "trainer",
        {
            "throughput_against_bare_torch": throughput.as_dict(),
            "packing_speed_up": speed_up.as_dict(),
            "padded_tokens_per_token": padding,
            "gradient_difference": {"largest": difference, "relative": difference / scale},
            "tokens": {"step": short.num_tokens, "packing": long.num_tokens},
            "seconds": {"step": overhead.as_dict(), "packing": packing.as_dict()},
        },
    )
