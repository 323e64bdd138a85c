"""The fixtures of `tests/engines`, which plug-in tests share."""

from tests.engines.conftest import endless, engine, gate, tokenizer, tokenizer_directory

__all__ = ["endless", "engine", "gate", "tokenizer", "tokenizer_directory"]
