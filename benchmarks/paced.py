"""A stand-in for devices: the bigram engine and trainer, which wait until as much time is over as a device would take.

All else of a run is real. What is timed is then the schedule and what the parts around the devices cost, and hardly how
busy this machine's few processors are. A recipe names the two as `benchmarks.paced:engine` and
`benchmarks.paced:PacedTrainer`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from inference_contract.engine import Engine
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.bigram.engine import BigramRunner
from pipelinerl.engines.external.worker.own_process import endpoints_of
from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import char_tokenizer
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.simulation.hardware import EngineTimes, TrainerTimes
from pipelinerl.trainers.bigram.trainer import BigramTrainer
from trainer_contract.types import LossStats, MicroBatch, Objective

#: What the devices take.
ENGINE: Final = EngineTimes(step_s=0.03, row_s=0.0005)
TRAINER: Final = TrainerTimes(token_s=0.001)
_CONTEXT: Final = 160
_RECIPE: Final = """
[run]
name = "paced"
steps = 40
[model]
path = "{model}"
[engine]
type = "benchmarks.paced:engine"
slots = 64
context_length = {context}
device = "cpu"
[trainer]
type = "benchmarks.paced:PacedTrainer"
device = "cpu"
[optimizer]
learning_rate = 1e-9
[[domains]]
name = "divisors"
source = "addition"
verifier = "math_answer"
[objective]
preset = "pipelinerl"
[sampling]
group_size = 8
max_tokens = 48
[training]
rollouts_per_step = 64
no_signal = "train"
[evaluation]
problems = 8
interval_steps = 1000000
[checkpoint]
interval_steps = 1000000
"""


def paced_recipe(folder: Path) -> Path:
    """A recipe and its model, written into `folder`; the recipe's path."""
    model = folder / "model"
    tokenizer = char_tokenizer(alphabet="0123456789")
    BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=_CONTEXT).save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
    recipe = folder / "paced.toml"
    recipe.write_text(_RECIPE.format(model=model, context=_CONTEXT))
    return recipe


def engine(options: EngineOptions) -> Engine:
    """The bigram engine, as slow as `ENGINE`."""
    return BatchingEngine(
        options,
        load=lambda: _PacedRunner(
            BigramRunner(
                BigramModel.load(options.model_path), rows=options.slots, context_length=options.context_length
            )
        ),
        tokenizer=ChatTokenizer.load(options.model_path),
        endpoints=endpoints_of(options),
    )


@final
class _PacedRunner:
    """A `ModelRunner` that takes its time over a decode step."""

    def __init__(self, runner: BigramRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        until = time.monotonic() + ENGINE.decode_s(num_rows)
        sampled = self._runner.decode(num_rows)
        _wait(until)
        return sampled


@final
class PacedTrainer:
    """The bigram trainer, as slow as `TRAINER`."""

    def __init__(self) -> None:
        self._trainer = BigramTrainer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Its gradient, no sooner than a device would have it."""
        tokens = sum(len(each.token_ids) for each in micro_batches)
        until = time.monotonic() + TRAINER.token_s * tokens
        stats = self._trainer.backward(micro_batches, objective)
        _wait(until)
        return stats


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))
