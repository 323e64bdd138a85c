"""`engine` and `PacedTrainer`: engine and trainer of the bigram model, slowed down as the file `pace` says.

The file is in the model directory. A recipe names the two as `tests.fakes.paced_bigram:engine` and `…:PacedTrainer`.
They only sleep, so a test can make engines too slow, or too many, without using a processor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from inference_contract.engine import Engine
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from trainer_contract.types import LossStats, MicroBatch, Objective, TrainerSpec

ENGINE: Final = f"{__name__}:engine"
TRAINER: Final = f"{__name__}:PacedTrainer"


def set_pace(model: Path, *, decode_s: float, step_s: float) -> None:
    """Set the seconds that each decode step and each backward pass sleeps."""
    (model / "pace.new").write_text(f"{decode_s} {step_s}")
    (model / "pace.new").replace(model / "pace")


def _pace(model: Path) -> tuple[float, float]:
    decode_s, step_s = (model / "pace").read_text().split()
    return float(decode_s), float(step_s)


def engine(options: EngineOptions) -> Engine:
    def load() -> _PacedRunner:
        model = BigramModel.load(options.model_path)
        runner = BigramRunner(model, rows=options.slots, context_length=options.context_length)
        return _PacedRunner(runner, options.model_path)

    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(options, load=load, tokenizer=tokenizer, endpoints=endpoints_of(options))


@final
class _PacedRunner:
    def __init__(self, runner: BigramRunner, model: Path) -> None:
        self._runner, self._model = runner, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        time.sleep(_pace(self._model)[0])
        return self._runner.decode(num_rows)


@final
class PacedTrainer:
    """A `Trainer` that waits before each backward pass."""

    def __init__(self) -> None:
        self._trainer, self._model = BigramTrainer(), Path()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def init_worker(self, spec: TrainerSpec) -> None:
        self._model = spec.model_path
        self._trainer.init_worker(spec)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        time.sleep(_pace(self._model)[1])
        return self._trainer.backward(micro_batches, objective)
