"""Measure the cost of the torch trainer over bare torch, and the speed-up of packing.

- An RL step (forward, backward, clipping, AdamW) through `TorchTrainer`, against a plain torch loop on the same packed
  batch with the same model, attention and optimizer.
- The same ragged batch packed and padded, both in plain torch; their gradients must agree.
- The trainer's padded rows, for models that do not pack, against its packed rows: alone and with shared prompts.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Paired, Row, paired, report, seconds_of
from benchmarks.torch_step import CPU, Rows, bare_step, laid_out, random_batch, rl_step, trainer_of
from pipelinerl.models.checkpoint import load_model, replace_attention
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION
from pipelinerl.trainers.torch.packed.segments import PaddedPlan
from pipelinerl.trainers.torch.packed_model import PackedModel
from pipelinerl.trainers.torch.passes import PassSetting, predict
from trainer_contract.types import MicroBatch

SHAPE: Final = DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=176, vocab=64, max_positions=512)
PROMPT: Final = 8
RATE: Final = 1e-4


def ragged_batch(sampled: Any, *, seed: int) -> MicroBatch:
    """Return a micro-batch of rollouts; rollout i has `sampled[i]` sampled tokens after a prompt of `PROMPT` tokens."""
    lengths = (np.asarray(sampled) + PROMPT).tolist()
    return random_batch(lengths, [PROMPT] * len(lengths), vocab=SHAPE.vocab, seed=seed)


def _gradients(rows: Rows) -> list[torch.Tensor]:
    rows.backward()
    gradients = [parameter.grad.clone() for parameter in rows.model.parameters()]
    rows.model.zero_grad()
    return gradients


def _rows_compared(path: Path, batch: MicroBatch, rounds: int) -> Paired:
    """Measure the processor seconds of the trainer's passes, with the same model as packed and as padded rows."""
    packing = load_model(path)
    replace_attention(packing, IMPLEMENTATION)
    packed, padded = PackedModel(packing), PackedModel(load_model(path))

    def once(model: PackedModel, setting: PassSetting) -> None:
        predict(model, setting, batch, batch.loss_mask).sum().backward()
        model.zero_grad()

    arms = {
        "packed": partial(once, packed, PassSetting(CPU)),
        "padded": partial(once, padded, PassSetting(CPU, PaddedPlan.of)),
    }
    return paired({name: seconds_of(arm, clock=time.process_time) for name, arm in arms.items()}, rounds, warmup=2)


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    rounds = 8 if quick else 30
    short = ragged_batch(generator(0, "short").integers(4, 25, 256), seed=1)
    # The usual distribution of lengths in RL: most completions are short, a few reach the limit.
    long = ragged_batch(np.minimum(generator(0, "long").geometric(1 / 40, 48) + 4, 300), seed=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        random_decoder(SHAPE, seed=0).save_pretrained(path)
        step = partial(rl_step, trainer_of(path), short, learning_rate=RATE)
        bare = bare_step(laid_out(path, short), learning_rate=RATE)
        overhead = paired({"trainer": seconds_of(step), "bare": seconds_of(bare)}, rounds, warmup=3)
        packed, padded = laid_out(path, long), laid_out(path, long, plan=None)
        pairs = list(zip(_gradients(packed), _gradients(padded), strict=True))
        scale = max(float(b.abs().max()) for _, b in pairs)
        difference = max(float((a - b).abs().max()) for a, b in pairs) / scale
        arms = {"packed": seconds_of(packed.backward), "padded": seconds_of(padded.backward)}
        packing = paired(arms, rounds, warmup=2)
        tokens = np.where(long.position_ids < PROMPT, long.position_ids, long.token_ids).astype(np.int32)
        alone, shared = (
            _rows_compared(path, batch, rounds).ratio("padded", "packed")
            for batch in (long, replace(long, token_ids=tokens))
        )
    throughput, speed_up = overhead.ratio("bare", "trainer"), packing.ratio("padded", "packed")
    rows = [
        Row("trainer / bare torch, throughput", throughput, ">= 0.90 (goal 0.98)", throughput.median >= 0.90),
        Row("packed / padded, speed-up", speed_up, "> 1", speed_up.low > 1.0),
        Row("trainer's padded rows / packed rows, processor time", alone, "<= 1.3", alone.median <= 1.3),
        Row("    with shared prompts", shared),
        Row("largest difference of gradients, relative", difference, "<= 1e-5", difference <= 1e-5),
    ]
    payload = {
        "throughput_against_bare_torch": throughput.as_dict(),
        "packing_speed_up": speed_up.as_dict(),
        "padded_rows": alone.as_dict(),
        "padded_rows_with_shared_prompts": shared.as_dict(),
        "gradient_difference": difference,
        "tokens": {"step": short.num_tokens, "packing": long.num_tokens},
        "seconds": {"step": overhead.as_dict(), "packing": packing.as_dict()},
    }
    report("trainer", rows, payload, quick=quick)
