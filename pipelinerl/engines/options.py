"""What a recipe says of an engine, whatever its type: the one argument of every registered `from_options`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options common to all engines; one that an engine type cannot honour is refused by it, never ignored.

    Attributes:
        model_path: directory of the model it starts with.
        model_id: name under which requests ask for it.
        slots: sequences that run at once.
        max_waiting: samples that may wait for a slot.
        context_length: most tokens of a sequence, prompt included.
        dtype: `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads for the model; None leaves the library's default.
        seed: keys the noise of requests that name no seed.
    """

    model_path: Path
    model_id: str
    slots: int
    max_waiting: int
    context_length: int
    dtype: str = "float32"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
