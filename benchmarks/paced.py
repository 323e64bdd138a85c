"""A recipe with simulated devices: a bigram engine and a bigram trainer that wait as long as a GPU would take.

All other parts are those of a real run, except that the verifier alternates between two verdicts. The time therefore
depends on the schedule and on those other parts, hardly on this machine's load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.served_engine import RunnerWith
from inference_contract.engine import Engine
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.simulation.hardware import EngineTimes, TrainerTimes
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from trainer_contract.types import LossStats, MicroBatch, Objective

#: Seconds that the simulated devices take: the engine per decode step and per row in it, the trainer per token.
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
verifier = "benchmarks.paced:alternating"
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
    """Write a recipe and its model into `folder`; return the recipe's path."""
    model = folder / "model"
    save_bigram(model, context_length=_CONTEXT)
    recipe = folder / "paced.toml"
    recipe.write_text(_RECIPE.format(model=model, context=_CONTEXT))
    return recipe


def save_bigram(folder: Path, *, context_length: int) -> None:
    """Write a bigram model of digits, all equally likely, and its tokenizer into `folder`."""
    tokenizer = char_tokenizer(alphabet="0123456789")
    BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=context_length).save(folder)
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)


def engine(options: EngineOptions, decode_s: Callable[[int], float] = ENGINE.decode_s) -> Engine:
    """Return a bigram engine whose decode steps of n rows take `decode_s(n)` seconds."""

    def load() -> Any:
        model = BigramModel.load(options.model_path)
        runner = BigramRunner(model, rows=options.slots, context_length=options.context_length)

        def decode(num_rows: int) -> tuple[list[int], list[float]]:
            until = time.monotonic() + decode_s(num_rows)
            sampled = runner.decode(num_rows)
            _wait(until)
            return sampled

        return RunnerWith(runner, decode)

    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(options, load=load, tokenizer=tokenizer, endpoints=endpoints_of(options))


class PacedTrainer:
    """A bigram trainer whose backward passes take `token_s` seconds for each token."""

    def __init__(self, token_s: float = TRAINER.token_s) -> None:
        self._token_s = token_s
        self._trainer = BigramTrainer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Compute the gradient, then wait until as much time has passed as a real device would take."""
        tokens = sum(len(each.token_ids) for each in micro_batches)
        until = time.monotonic() + self._token_s * tokens
        stats = self._trainer.backward(micro_batches, objective)
        _wait(until)
        return stats


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


async def alternating(completions: Sequence[str]) -> list[float]:
    """Judge a group's answers alternately wrong and correct, without delay."""
    return [float(place % 2) for place in range(len(completions))]
