"""Engine options for tests that set only a few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.engines.options import EngineOptions


def engine_options(**named: Any) -> EngineOptions:
    """Return engine options with the settings in `named`, and defaults for all others."""
    assumed = {"model_path": Path("nowhere"), "model_id": "m", "slots": 4, "max_waiting": 4096, "context_length": 64}
    return EngineOptions(**{**assumed, **named})
