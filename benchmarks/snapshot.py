"""What checkpoints cost a step: how long training stands still for them, and how much slower it gets beside them.

The trainer and the checkpoints are those of a run; so is the core, which on a small machine the thread that takes
checkpoints to the disk shares with the trainer. Four arms, in turn, with a checkpoint after every step, which is what
`j = 1` and a checkpoint at each reload boundary come to:

    none         steps alone
    beside       captured beside the passes of the next step, then digested, synced and renamed
    free         the same with a core for the checkpoints, where there is one
    standing     the same checkpoint while training waits for it

Standing still, for the checkpoint before or until the state is captured, is told by the stall ÷ none; whatever else
makes a step slower, by the ratio of the arms. A recipe takes a checkpoint every `checkpoint.interval_steps`, which
divides both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, final

import torch

from benchmarks.measure import Row, paired, print_table, write_record
from benchmarks.trainer import ragged_batch
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.messages import Checkpointed, ControlMessage
from pipelinerl.models.tiny_decoder import DebugSize, char_tokenizer, random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.checkpoints.checkpoint import Capture, CheckpointStore
from pipelinerl.training.checkpoints.checkpointing import Checkpointing
from pipelinerl.training.checkpoints.manifest import TrainingState
from trainer_contract.types import Device, MicroBatch, TrainerSpec

_TARGET: Final = 0.02
#: Of every model that is used here, shipped ones included.
_VOCAB: Final = 57


@dataclass(frozen=True, slots=True)
class Size:
    """A model, the rollouts of a step, the steps of one sample, and the samples of each arm."""

    name: str
    shape: DebugSize | None
    rollouts: int
    steps: int
    rounds: int


SIZES: Final = (
    Size("tiny (shipped)", None, rollouts=256, steps=10, rounds=9),
    Size("24 MB", DebugSize.MB_24, rollouts=128, steps=3, rounds=5),
    Size("310 MB", DebugSize.MB_310, rollouts=32, steps=2, rounds=3),
)


@final
@dataclass
class Training:
    """A trainer on a thread of its own, its batch, and where its checkpoints go."""

    trainer: TorchTrainer
    batch: MicroBatch
    store: CheckpointStore
    steps: int
    cores: set[int]
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    stalls: list[float] = field(default_factory=list)

    def alone(self) -> float:
        """Seconds a step without checkpoints."""
        return asyncio.run(self._steps(lambda: None))

    def standing(self) -> float:
        """Seconds a step when it waits for its checkpoint."""
        return asyncio.run(self._steps(lambda: self.store.commit(self._capture())))

    def beside(self) -> float:
        """Seconds a step with a checkpoint on its way beside it; the last one's way is part of it."""
        return asyncio.run(self._beside())

    def free(self) -> float:
        """As `beside`; threads that are made now, the checkpoints' among them, have all cores."""
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            return asyncio.run(self._beside())
        finally:
            os.sched_setaffinity(0, own)

    async def _steps(self, after: Callable[[], object]) -> float:
        began = time.perf_counter()
        for _ in range(self.steps):
            await self._in_worker(self._passes)
            await self._in_worker(self._update)
            await self._in_worker(after)
        return (time.perf_counter() - began) / self.steps

    async def _beside(self) -> float:
        async def report(message: ControlMessage) -> None:
            if isinstance(message, Checkpointed):
                self.stalls.append(message.stall_s)

        async def trim(_: dict[str, str], epoch: int) -> None:
            pass

        saving = Checkpointing(self.store, report=report, trim=trim, deadline_s=60.0)
        began = time.perf_counter()
        for _ in range(self.steps):
            await self._in_worker(self._passes)
            await saving.captured()
            await self._in_worker(self._update)
            await saving.begin(self._state(), self._capture)
        await saving.finish()
        return (time.perf_counter() - began) / self.steps

    def _passes(self) -> None:
        self.trainer.backward([self.batch], resolve("pipelinerl"))

    def _update(self) -> None:
        self.trainer.optimizer_step(learning_rate=1e-5)

    def _state(self) -> TrainingState:
        return TrainingState(model_version=self.trainer.model_version, epoch=1, offsets={}, ledger={}, controller={})

    def _capture(self) -> Capture:
        return self.store.capture(
            self._state(),
            layout=self.trainer.weight_layout(),
            weights=self.trainer.gather_weights(),
            parts={"trainer": self.trainer.save_state},
        )

    async def _in_worker(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.worker, call)


@contextmanager
def _training(size: Size, cores: set[int]) -> Iterator[Training]:
    """Everything that a size needs, on a disk rather than in memory; the trainer has the core of its caller."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".snapshot-") as folder:
        model = MODELS / "tiny_speller"
        if size.shape is not None:
            model = Path(folder) / "model"
            random_decoder(size.shape).save_pretrained(model)
            char_tokenizer().save_pretrained(str(model))
        batch = ragged_batch(generator(0, "snapshot").integers(4, 25, size.rollouts), seed=1)
        trainer = TorchTrainer()
        trainer.init_worker(TrainerSpec(model_path=model, device=Device.CPU))
        store = CheckpointStore(Path(folder) / "checkpoints", keep=1, model_directory=model)
        made = Training(trainer, replace(batch, token_ids=batch.token_ids % _VOCAB), store, size.steps, cores)
        made.worker.submit(int).result()  # the thread exists, and keeps the core that it has now
        try:
            yield made
        finally:
            made.worker.shutdown()
            trainer.close()


def measure(size: Size, *, rounds: int, interval: int, cores: set[int]) -> tuple[list[Row], dict[str, Any]]:
    """Rows and record of one size; `interval` is what a recipe would have."""
    with _training(size, cores) as training:
        arms = {
            "none": training.alone,
            "beside": training.beside,
            "free": training.free,
            "standing": training.standing,
        }
        times = paired(arms, rounds=rounds, warmup=1)
        tokens, bytes_written = training.batch.num_tokens, _bytes_of(training.store.all()[-1])
        stall, step = fmean(training.stalls), times.median("none")
    share, slower = stall / step, times.ratio("beside", "none")
    name, target = size.name, f"<= {_TARGET:g}"
    sizes = f"{step:.3g} s; {stall * 1e3:.3g} ms; {bytes_written / 1e6:.3g} MB"
    rows = [
        Row(f"{name}: still / step, every {interval} steps", share / interval, target, share / interval <= _TARGET),
        Row(f"{name}: still / step, after every step", share, target, share <= _TARGET),
        Row(f"{name}: steps with a checkpoint each / without, one core for all", slower),
        Row(f"{name}: the same, a core for the checkpoints", times.ratio("free", "none")),
        Row(f"{name}: the same, training waiting for them", times.ratio("standing", "none")),
        Row(f"    step of {tokens} tokens; stall; checkpoint", sizes),
    ]
    record = {
        "tokens": tokens,
        "checkpoint_bytes": bytes_written,
        "step_s": step,
        "stall_s": stall,
        "interval_steps": interval,
        "share_at_interval": share / interval,
        "share_at_each_step": share,
        "slower_beside": slower.as_dict(),
        "slower_free": times.ratio("free", "none").as_dict(),
        "slower_standing": times.ratio("standing", "none").as_dict(),
        **times.as_dict(),
    }
    return rows, record


def _bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def run(quick: bool = False) -> None:
    """Measure, print, record."""
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # as the launcher does on a small machine
    interval = load("tiny").checkpoint.interval_steps
    rows, records = [], {}
    try:
        for size in SIZES[:2] if quick else SIZES:
            found, records[size.name] = measure(
                size, rounds=2 if quick else size.rounds, interval=interval, cores=cores
            )
            rows += found
    finally:
        os.sched_setaffinity(0, cores)
    print_table("snapshot", rows)
    if not quick:
        write_record("snapshot", records)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, small models")
    run(quick=parser.parse_args().quick)
