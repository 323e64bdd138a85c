"""What `pipelinerl check` predicts that trainers of 7, 32 and 70 billion parameters take of each card: no measurement.

Whole models and LoRA of rank 16, in bf16 with gradient checkpointing, in micro-batches of 8,192 tokens, all of which
have a loss, on 1, 8 and 64 cards (`dp_shard`), where gradients are divided, too. The table is that of docs/trainers.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pipelinerl.models.model_shape import ModelShape, read_shape
from pipelinerl.roles.memory.trainer_memory import TrainerMemory
from pipelinerl.trainers.torch.mesh import GradientSum
from pipelinerl.trainers.torch.optimizer.optimizer_options import MomentDType, StatePlace
from trainer_contract.types import Precision, WeightDType

_TOKENS: Final = 8192
_CARDS: Final = (1, 8, 64)
#: Sizes as in the configurations that Qwen and Meta publish.
_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Llama-3-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
#: How a model is trained, as a recipe's options say it, and as the prediction takes it.
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "whole": {},
    'whole, `optimizer.moments = "bf16"`': {"moments": MomentDType.BF16},
    'whole, `optimizer.place = "host"`': {"place": StatePlace.HOST},
    "LoRA": {"rank": 16},
}


def lines() -> Iterator[str]:
    """The table, in Markdown: bytes of each card, and of the host for each card where the state is there."""
    yield "| GiB of each card, predicted | 1 card | 8 cards | 64 cards |"
    yield f"|---|{'--:|' * len(_CARDS)}"
    for model, table in _MODELS.items():
        shape = _shape(table)
        for kind, given in _KINDS.items():
            told = (_told(shape, cards, given) for cards in _CARDS)
            yield f"| {model}, {kind} | {' | '.join(told)} |"


def _told(shape: ModelShape, cards: int, given: Mapping[str, Any]) -> str:
    memory = TrainerMemory(
        shape=shape,
        precision=Precision.BF16,
        tokens=_TOKENS,
        trained=_TOKENS,
        checkpointing=True,
        shards=cards,
        wire=WeightDType.BFLOAT16,
        gradients=GradientSum.DIVIDED,
        **given,
    )
    beside = f" + {memory.host / 2**30:,.0f} host" if memory.host else ""
    return f"{memory.total / 2**30:,.0f}{beside}"


def _shape(table: Mapping[str, Any]) -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**table, "torch_dtype": "bfloat16"}))
        return read_shape(Path(folder))


def run(quick: bool = False) -> list[str]:
    """Print the table."""
    del quick
    found = list(lines())
    print("\n".join(found))
    return found


if __name__ == "__main__":
    run()
