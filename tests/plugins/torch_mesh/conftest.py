"""The fixtures of `tests/trainers`, which plug-in tests share."""

from tests.trainers.conftest import micro_batch, model_path

__all__ = ["micro_batch", "model_path"]
