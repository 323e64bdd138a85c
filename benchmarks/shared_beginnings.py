"""What a step of the torch trainer costs when rollouts begin alike, over the same step when none do.

The arms train the same number of rollouts of the same lengths, so that all else is equal and ratios are what is saved.

    apart     each rollout differs from all others in its first token
    prompts   the rollouts of a group have one prompt
    tree      so they have, half of each prompt is the same in all groups, and half of each answer within its group
"""

from __future__ import annotations

import argparse
import tempfile
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Row, paired, print_table, seconds_of, write_record
from pipelinerl.models.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, MicroBatch, TrainerSpec

SHAPE = DecoderShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=704, vocab=512, max_positions=4096)
GROUP = 8
GROUPS = 4
#: (prompt, answer) lengths: short questions, few-shot prompts, long documents, and long answers.
LENGTHS = ((32, 96), (128, 64), (512, 64), (64, 512))
RATE = 1e-5


class Alike(StrEnum):
    """What rollouts begin with alike."""

    APART = "apart"
    PROMPTS = "prompts"
    TREE = "tree"

    def share(self, prompt: int, answer: int) -> float:
        """The tokens that are computed, of all."""
        if self is Alike.APART:
            return 1.0
        if self is Alike.PROMPTS:
            return (prompt / GROUP + answer) / (prompt + answer)
        of_prompts = (prompt - prompt // 2) / GROUP + prompt // 2 / (GROUP * GROUPS)
        of_answers = answer - answer // 2 + answer // 2 / GROUP
        return (of_prompts + of_answers) / (prompt + answer)


def batch(prompt: int, answer: int, alike: Alike) -> MicroBatch:
    """GROUPS groups of GROUP rollouts."""
    draw, length, count = generator(0, "shared_beginnings"), prompt + answer, GROUP * GROUPS
    tokens = draw.integers(0, SHAPE.vocab, (count, length)).astype(np.int32)
    of_group = prompt + answer // 2 if alike is Alike.TREE else prompt
    tokens[:, :of_group] = np.repeat(tokens[::GROUP, :of_group], GROUP, axis=0)
    if alike is Alike.TREE:
        tokens[:, : prompt // 2] = tokens[0, : prompt // 2]
    elif alike is Alike.APART:
        tokens[:, 0] = np.arange(count)
    sampled = np.tile(np.arange(length) >= prompt, count)
    return MicroBatch(
        token_ids=tokens.ravel(),
        position_ids=np.tile(np.arange(length, dtype=np.int32), count),
        segment_ids=np.repeat(np.arange(count, dtype=np.int32), length),
        loss_mask=sampled,
        advantages=np.where(sampled, np.repeat(draw.normal(size=count), length), 0.0).astype(np.float32),
        weights=np.where(sampled, 1.0 / count, 0.0).astype(np.float32),
        behavior_logprobs=np.where(sampled, -np.log(SHAPE.vocab), 0.0).astype(np.float32),
        temperatures=np.ones(tokens.size, dtype=np.float32),
        num_segments=count,
    )


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    objective, rows, payload = resolve("pipelinerl"), [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        random_decoder(SHAPE, seed=0).save_pretrained(path)
        trainer = TorchTrainer()
        trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))
        for prompt, answer in LENGTHS[: 2 if quick else None]:

            def step(one: MicroBatch) -> None:
                trainer.backward([one], objective)
                trainer.optimizer_step(learning_rate=RATE)

            arms = {name.value: seconds_of(partial(step, batch(prompt, answer, name))) for name in Alike}
            timings = paired(arms, rounds=3 if quick else 7)
            found: dict[str, Any] = {}
            for alike in (Alike.PROMPTS, Alike.TREE):
                ratio, share = timings.ratio(alike, Alike.APART), alike.share(prompt, answer)
                name = f"step, {GROUPS} x {GROUP} rollouts of {prompt} + {answer} tokens: {alike} / apart"
                rows.append(Row(name, ratio, f"(its tokens: {share:.2f})"))
                found[alike] = {"ratio": ratio.as_dict(), "share_of_tokens": share}
            payload[f"{prompt}+{answer}"] = {**found, **timings.as_dict()}
        trainer.close()
    print_table("shared beginnings", rows)
    write_record("shared_beginnings", {"quick": quick, **payload})
    return payload


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    run(quick=parser.parse_args().quick)
