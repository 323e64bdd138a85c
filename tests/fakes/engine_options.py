"""Engines and engine options for tests that set only a few of them."""

from pathlib import Path

from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel


def engine_options(**named):
    """Return engine options with the settings in `named`, and defaults for all others."""
    assumed = {"model_path": Path("nowhere"), "model_id": "m", "slots": 4, "max_waiting": 4096, "context_length": 64}
    return EngineOptions(**{**assumed, **named})


def bigram_engine(tokenizer, *, logits=None, rows=2, context_length=64):
    """Return an engine of a random bigram model, or of the one with these `logits`."""
    model = BigramModel.random(tokenizer.vocab_size, seed=1, context_length=context_length)
    if logits is not None:
        model = BigramModel(logits=logits)
    return BatchingEngine(engine_options(), load=lambda: BigramRunner(model, rows=rows), tokenizer=tokenizer)
