"""`engine` and `PacedTrainer`: engine and trainer of the bigram model, slowed down as the file `pace` says.

The file is in the model directory. A recipe names the two as `tests.fakes.paced_bigram:engine` and `…:PacedTrainer`.
They only sleep, so a test can make engines too slow, or too many, without using a processor.
"""

import time
from pathlib import Path
from typing import Final, final

from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer

ENGINE: Final = f"{__name__}:engine"
TRAINER: Final = f"{__name__}:PacedTrainer"


def set_pace(model, *, decode_s, step_s):
    """Set the seconds that each decode step and each backward pass sleeps."""
    (model / "pace.new").write_text(f"{decode_s} {step_s}")
    (model / "pace.new").replace(model / "pace")


def _pace(model):
    decode_s, step_s = (model / "pace").read_text().split()
    return float(decode_s), float(step_s)


def engine(options):
    def load():
        model = BigramModel.load(options.model_path)
        runner = BigramRunner(model, rows=options.slots, context_length=options.context_length)
        return _PacedRunner(runner, options.model_path)

    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(options, load=load, tokenizer=tokenizer, endpoints=endpoints_of(options))


@final
class _PacedRunner:
    def __init__(self, runner, model):
        self._runner, self._model = runner, model

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def decode(self, num_rows):
        time.sleep(_pace(self._model)[0])
        return self._runner.decode(num_rows)


@final
class PacedTrainer:
    def __init__(self):
        self._trainer, self._model = BigramTrainer(), Path()

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def init_worker(self, spec):
        self._model = spec.model_path
        self._trainer.init_worker(spec)

    def backward(self, micro_batches, objective):
        time.sleep(_pace(self._model)[1])
        return self._trainer.backward(micro_batches, objective)
