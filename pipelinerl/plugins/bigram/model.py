"""The bigram model: the smallest language model that can be trained and served. numpy only.

Row i of `logits` [V, V] holds the logits of the token after token i. A bigram model is saved as the same files as a
Hugging Face model. In tests, the bigram engine and trainer can thus replace real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipelinerl import rng
from pipelinerl.config.sections import ModelSection
from pipelinerl.errors import ModelError
from pipelinerl.models.directory_files import json_object

MODEL_TYPE: Final = "bigram"
PARAMETER: Final = "bigram.logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BigramModel:
    """A model with vocabulary V; `logits[i, j]`, f32 [V, V], is the logit of token j after token i."""

    logits: NDArray[np.float32]
    context_length: int = 512

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[0] != self.logits.shape[1] or self.logits.dtype != np.float32:
            raise ModelError(f"{PARAMETER} must be float32 [V, V], got {self.logits.dtype} {list(self.logits.shape)}")

    @classmethod
    def random(cls, vocab_size: int, *, seed: int, scale: float = 1.0, context_length: int = 512) -> BigramModel:
        """Return a model with random normal logits of standard deviation `scale`; 0 makes all tokens equally likely."""
        logits = rng.generator(seed, MODEL_TYPE).standard_normal((vocab_size, vocab_size)) * scale
        return cls(logits=logits.astype(np.float32), context_length=context_length)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, V."""
        return int(self.logits.shape[0])

    def save(self, path: Path) -> None:
        """Write the model's files into the directory `path`, which may already contain a tokenizer."""
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["BigramModel"],
            "model_type": MODEL_TYPE,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
        }
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file({PARAMETER: np.ascontiguousarray(self.logits)}, path / "model.safetensors", metadata={"format": "np"})

    @classmethod
    def load(cls, path: Path) -> BigramModel:
        """Read a directory that `save` wrote. Raises ModelError if it is missing, damaged or has another model type."""
        try:
            config = json_object(path / "config.json")
            tensors = load_file(path / "model.safetensors")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(
                f"{path} must hold config.json and model.safetensors of a bigram model: {error}"
            ) from error
        kind = config.get("model_type")
        if kind != MODEL_TYPE or PARAMETER not in tensors:
            raise ModelError(
                f"{path} must hold a model of type {MODEL_TYPE!r} with the parameter {PARAMETER!r}, got type {kind!r} "
                f"with {sorted(tensors)}"
            )
        return cls(logits=tensors[PARAMETER], context_length=int(config.get("max_position_embeddings", 512)))


def findings(section: object, model: ModelSection, others: object) -> Iterator[tuple[str, str]]:
    """Yield nothing; raise `ModelError` if the model cannot be loaded. See `TrainerComponent.check`."""
    BigramModel.load(model.resolved)
    yield from ()
