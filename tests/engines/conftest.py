"""Model directories and engines for the engine tests."""

import pytest

from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from tests.fakes.engine_options import engine_options
from tests.fakes.gated_runner import GatedRunner


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory):
    return ChatTokenizer.load(tokenizer_directory)


@pytest.fixture(scope="session")
def endless(tokenizer):
    """The tokenizer of `tokenizer`, but without an end token, so that every sample has the requested length."""
    return ChatTokenizer(tokenizer._tokenizer, ())


@pytest.fixture
def gate(tokenizer):
    """A runner of a bigram model with 4 rows and 64 tokens of context; decode steps wait until the test allows them."""
    model = BigramModel.random(tokenizer.vocab_size, seed=1, context_length=64)
    return GatedRunner(BigramRunner(model, rows=4))


@pytest.fixture
async def engine(gate, endless):
    """A started engine that uses the runner `gate`; after the test, the gate is opened."""
    built = BatchingEngine(engine_options(max_waiting=16), load=lambda: gate, tokenizer=endless)
    await built.start()
    yield built
    gate.open()
    await built.close()
