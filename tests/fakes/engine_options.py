"""Options of an engine in a test that cares for few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.engines.options import EngineOptions


def engine_options(**named: Any) -> EngineOptions:
    """What is `named`, of a model `m` that is nowhere, with 4 slots and a context of 64 tokens unless that is named."""
    assumed = {"model_path": Path("nowhere"), "model_id": "m", "slots": 4, "max_waiting": 4096, "context_length": 64}
    return EngineOptions(**{**assumed, **named})
