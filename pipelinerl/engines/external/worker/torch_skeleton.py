"""`skeleton`: a model without values, for engines whose weights are in another process."""

from __future__ import annotations

from typing import Any

from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.checkpoint import check_weights


def skeleton(options: EngineOptions) -> Any:
    """The model as transformers names and orders its parameters, which is how a trainer sends them; no values.

    Raises:
        ModelError: the directory holds no whole model.
    """
    model: Any = check_weights(options.model_path)
    return {"float32": model.float, "bfloat16": model.bfloat16, "float16": model.half}[options.dtype]()
