"""What the sample log costs a step, and how many bytes it comes to.

The trainer, the batch and the log are those of a run; so is the core, which the log's thread shares with the trainer
here. Three arms, in turn:

    step      a step alone: batch, passes, optimizer step
    logged    the same, its figures by domain taken and its samples written, and waited for
    log       the figures and the samples alone, of the same step

Each measures processor time, of all threads, since the machine is shared. What the log costs is told by log ÷ step;
logged ÷ step says the same with the noise of two whole steps in it. The log is near its bound when it begins, so that
removing old files is part of the cost.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import numpy as np
import torch

from benchmarks.measure import Row, paired, print_table, write_record
from pipelinerl.config.recipe import MODELS
from pipelinerl.models.tiny_decoder import DebugSize, char_tokenizer, random_decoder
from pipelinerl.models.tokenizer import decoder_of
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.samples.record import SampleGroup
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.rollouts.batch import TrainBatch, build
from pipelinerl.training.step.forward_passes import ForwardPasses
from pipelinerl.training.step.train_step import TrainStep
from pipelinerl.training.watching.step_watch import StepWatch
from pipelinerl.training.watching.training_samples import TrainingSamples
from pipelinerl.types import (
    Outcome,
    ProblemSummary,
    Rollout,
    RolloutGroup,
    Turn,
    Verdict,
    VersionSpan,
)
from trainer_contract.types import Device, LossStats, OptimizerSpec, TrainerSpec

_TARGET: Final = 0.01
_MAX_BYTES: Final = 2**20
#: Of every model that is used here, shipped ones included.
_VOCAB: Final = 57
_OBJECTIVE: Final = resolve("grpo")


@dataclass(frozen=True, slots=True)
class Size:
    """A model, the groups of a step and their rollouts, tokens of a prompt and of an answer, steps of one sample."""

    name: str
    shape: DebugSize | None
    groups: int
    rollouts: int
    prompt: int
    answer: int
    steps: int


SIZES: Final = (
    Size("make run", None, groups=32, rollouts=8, prompt=24, answer=8, steps=2),
    Size("24 MB, longer answers", DebugSize.MB_24, groups=4, rollouts=4, prompt=32, answer=128, steps=1),
)


@final
@dataclass
class Watched:
    """A trainer, the groups of its steps, and who watches them."""

    step: TrainStep
    groups: list[RolloutGroup]
    watch: StepWatch
    log: SampleLog
    steps: int
    version: int = 0
    last: TrainBatch | None = field(default=None)
    losses: list[LossStats | None] = field(default_factory=list)

    def alone(self) -> None:
        """Steps that nobody watches."""
        for _ in range(self.steps):
            self._take()

    def logged(self) -> None:
        """Steps, each watched; the last samples are written."""
        for _ in range(self.steps):
            self._look(self._take())
        self.drained()

    def log_only(self) -> None:
        """As much watching of a step that was taken before."""
        assert self.last is not None, "a step is taken first"
        for _ in range(self.steps):
            self._look(self.last)
        self.drained()

    def drained(self) -> None:
        """Return once everything is written."""
        written = threading.Event()

        def end() -> list[SampleGroup]:
            written.set()
            return []

        self.log.put(end)
        if not written.wait(60.0):
            raise TimeoutError("the log's thread has not written its samples within 60 s")

    def _take(self) -> TrainBatch:
        version = self.step.passes.policy.model_version + 1
        self.last = build(self.groups, objective=_OBJECTIVE, token_budget=8192, producing=version)
        accumulated = self.step.accumulate(self.last, _OBJECTIVE)
        self.losses = accumulated.losses
        self.step.apply(accumulated, learning_rates=[0.0])
        return self.last

    def _look(self, batch: TrainBatch) -> None:
        self.version += 1
        self.watch.stepped(batch, batch.micro_batches, version=self.version, losses=self.losses)


def groups_of(size: Size) -> list[RolloutGroup]:
    """Groups of random tokens, half of their rollouts right, each with two spans."""
    draw = generator(0, "samples", size.name)

    def rollout(right: bool) -> Rollout:
        length = int(draw.integers(max(2, size.answer // 2), size.answer + 1))
        turn = Turn(
            context_token_ids=draw.integers(4, _VOCAB, size.prompt).astype(np.int32),
            token_ids=draw.integers(4, _VOCAB, length).astype(np.int32),
            behavior_logprobs=-draw.exponential(1.0, length).astype(np.float32),
            spans=(VersionSpan(0, 1), VersionSpan(1, length - 1)),
        )
        outcome = Outcome.CORRECT if right else Outcome.WRONG
        verdict = Verdict(outcome=outcome, reward=float(right), reason="score 0.5")
        return Rollout(turns=(turn,), verdict=verdict, finish_reason="stop", temperature=1.0)

    return [
        RolloutGroup(
            group_id=f"prompt-{index:06d}",
            index=index,
            domain=f"domain-{index % 3}",
            actor="actor-0",
            rollouts=tuple(rollout(number % 2 == 0) for number in range(size.rollouts)),
            problem=ProblemSummary(f"problem-{index}", ("subject=a", f"level={index % 5}"), "the truth"),
        )
        for index in range(size.groups)
    ]


def watched(size: Size, folder: Path) -> Watched:
    """The parts of a run of this size."""
    model = MODELS / "tiny_speller"
    if size.shape is not None:
        model = folder / "model"
        tokenizer = char_tokenizer()
        random_decoder(size.shape).save_pretrained(model)
        tokenizer.save_pretrained(str(model), save_jinja_files=False)
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=model, device=Device.CPU, optimizer=OptimizerSpec()))
    log = SampleLog(folder / "samples", "training", max_bytes=_MAX_BYTES)
    samples = TrainingSamples(log=log, decode=decoder_of(model), seed=0, groups_per_step=2)
    step = TrainStep(passes=ForwardPasses(policy=trainer))
    return Watched(step, groups_of(size), StepWatch(samples), log, size.steps)


def processor_seconds_of(work: Callable[[], None]) -> Callable[[], float]:
    """An arm that measures what `work` costs the processor in all threads of this process, whoever else is busy."""

    def arm() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return arm


def one_core() -> None:
    """Share one core with the log's thread: every moment that it takes is the trainer's."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def measured(size: Size, *, quick: bool) -> tuple[list[Row], dict[str, object]]:
    """Rows and record of one size."""
    with tempfile.TemporaryDirectory(prefix="pipelinerl-samples-") as name:
        folder = Path(name)
        run = watched(size, folder)
        run.alone()
        while sum(path.stat().st_size for path in (folder / "samples").glob("*")) < _MAX_BYTES // 2:
            run.log_only()
        arms: dict[str, Callable[[], float]] = {
            "step": processor_seconds_of(run.alone),
            "logged": processor_seconds_of(run.logged),
            "log": processor_seconds_of(run.log_only),
        }
        timings = paired(arms, rounds=5 if quick else 21, warmup=0 if quick else 1)
        run.log.close()
        size_bytes = sum(path.stat().st_size for path in (folder / "samples").glob("*"))
        run.step.passes.policy.close()
    cost, ratio = timings.ratio("log", "step"), timings.ratio("logged", "step")
    rows = [
        Row(f"{size.name}: log / step", cost, f"<= {_TARGET}", cost.median <= _TARGET),
        Row(f"{size.name}: step with its log / step", ratio),
        Row(f"{size.name}: a step [ms]", 1e3 * timings.median("step") / size.steps),
        Row(f"{size.name}: bytes of the log", size_bytes, f"<= {_MAX_BYTES}", size_bytes <= _MAX_BYTES),
        Row(f"{size.name}: left out", run.log.left_out, "0", run.log.left_out == 0),
    ]
    record = {"cost": cost.as_dict(), "ratio": ratio.as_dict(), "bytes": size_bytes, **timings.as_dict()}
    return rows, record


def run(quick: bool) -> None:
    """Measure every size, print the table and write the record."""
    one_core()
    rows, record = [], {}
    for size in SIZES:
        more, record[size.name] = measured(size, quick=quick)
        rows += more
    print_table("the sample log", rows)
    write_record("samples", {"quick": quick, "target": _TARGET, "sizes": record})
