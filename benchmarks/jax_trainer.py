"""What the JAX trainer costs against the torch trainer, on one core each, and how often XLA compiles.

- An RL step (forward, backward, clipping, AdamW) of both trainers through the contract on the same packed batch: short
  rollouts, and rollouts as RL sees them, most of them short and a few long; after compilation.
- 200 steps over batches that are all of different lengths: programs compiled, and shapes of rows met.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import torch

from benchmarks.measure import Row, paired, print_table, seconds_of, write_record
from benchmarks.trainer import RATE, SHAPE, ragged_batch
from pipelinerl.models.tiny_decoder import random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.jax.segments import Rows
from pipelinerl.trainers.jax.trainer import JaxTrainer
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.trainer import Trainer
from trainer_contract.types import Device, MicroBatch, TrainerSpec

STEPS = 200


@contextmanager
def one_core() -> Iterator[None]:
    """This process on its first core alone: XLA sizes its thread pool by what it may use when it starts."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(allowed)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def started(trainer: Trainer, path: Path) -> Trainer:
    """With its model loaded."""
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))
    return trainer


def step_of(trainer: Trainer, batch: MicroBatch) -> Callable[[], None]:
    """One step through the contract."""
    objective = resolve("pipelinerl")

    def step() -> None:
        trainer.backward([batch], objective)
        trainer.optimizer_step(learning_rate=RATE)

    return step


def ragged_run(path: Path, steps: int) -> tuple[int, int, int]:
    """Programs compiled for `backward`, shapes of rows met and lengths met, over steps whose batches all differ."""
    programs: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event.endswith("backend_compile_duration") and about.get("fun_name") == "jit(accumulate)":
            programs.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    trainer, shapes, lengths = started(JaxTrainer(), path), set(), set()
    for number in range(steps):
        draw = generator(0, "ragged_run", number)
        sizes = np.minimum(draw.geometric(1 / 12, int(draw.integers(8, 49))) + 2, 100)
        batch = ragged_batch(sizes, seed=number)
        step_of(trainer, batch)()
        shapes.add(Rows.of(batch.position_ids).shape)
        lengths.add(batch.num_tokens)
    jax.monitoring.unregister_event_duration_listener(listen)
    return len(programs), len(shapes), len(lengths)


def run(quick: bool = False) -> None:
    """Measure, print, record."""
    rounds, steps = (6, 40) if quick else (20, STEPS)
    batches = {
        "short": ragged_batch(generator(0, "short").integers(4, 25, 256), seed=1),
        "heavy-tailed": ragged_batch(np.minimum(generator(0, "long").geometric(1 / 40, 48) + 4, 300), seed=2),
    }
    with tempfile.TemporaryDirectory() as folder, one_core():
        path = Path(folder)
        random_decoder(SHAPE, seed=0).save_pretrained(path)
        timings = {}
        for name, batch in batches.items():
            arms = {"jax": started(JaxTrainer(), path), "torch": started(TorchTrainer(), path)}
            timed = {arm: seconds_of(step_of(trainer, batch)) for arm, trainer in arms.items()}
            timings[name] = paired(timed, rounds, warmup=3)
        programs, shapes, lengths = ragged_run(path, steps)
    ratios = {name: timing.ratio("jax", "torch") for name, timing in timings.items()}
    rows = [Row(f"jax / torch, seconds of a step, {name}", ratio) for name, ratio in ratios.items()]
    rows += [
        Row(f"programs compiled in {steps} ragged steps", programs, f"<= {shapes} buckets", programs <= shapes),
        Row("different lengths among them", lengths),
    ]
    print_table("jax_trainer", rows)
    write_record(
        "jax_trainer",
        {
            "step_against_torch": {name: ratio.as_dict() for name, ratio in ratios.items()},
            "tokens": {name: batch.num_tokens for name, batch in batches.items()},
            "rows": {name: list(Rows.of(batch.position_ids).shape) for name, batch in batches.items()},
            "ragged_run": {"steps": steps, "programs": programs, "buckets": shapes, "lengths": lengths},
            "seconds": {name: timing.as_dict() for name, timing in timings.items()},
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    run(quick=parser.parse_args().quick)
