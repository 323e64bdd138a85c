"""The tokenizer and the micro-batches of the tests of other engines and trainers."""

from tests.engines.conftest import tokenizer, tokenizer_directory
from tests.trainers.conftest import micro_batch

__all__ = ["micro_batch", "tokenizer", "tokenizer_directory"]
