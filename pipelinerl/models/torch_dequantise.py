"""A copy of a quantised model directory in bf16, which trainer, engines and checkpoints can use.

transformers decodes the weights itself, once, so the memory that `pipelinerl check` predicts for the copy is that of a
run. The first sampled tokens come from the decoded weights, as in training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import (
    DEQUANTISED,
    check_directory,
    check_values,
    model_factory,
    quantisation,
    refuse_quantised,
    save_model,
)
from pipelinerl.models.directory_files import foreign_failures
from pipelinerl.models.tokenizer import ChatTokenizer


def dequantise(source: Path, target: Path) -> None:
    """Write the model of the directory `source`, in bf16, into the new directory `target`.

    Raises ModelError if `source` is not quantised, or in a way that transformers cannot decode, or if `target` exists.
    """
    check_directory(source)
    method = quantisation(source)
    if method is None:
        raise ModelError(f"{source} is not quantised; use it as it is")
    if method not in DEQUANTISED:
        refuse_quantised(source)
    if target.exists():
        raise ModelError(f"{target} exists already; choose another path or remove it")
    import torch
    import transformers

    tokenizer, factory = ChatTokenizer.load(source), model_factory(source)
    decoding: Any = getattr(transformers, DEQUANTISED[method])(dequantize=True)
    with foreign_failures(f"the weights in {source} cannot be decoded", "copy it again, or use another model"):
        model, report = factory.from_pretrained(
            str(source),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            quantization_config=decoding,
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise ValueError(f"{min(report['missing_keys'])} is absent")
        # The decoded model remembers its quantiser, which would change the names that `save_pretrained` writes.
        vars(model.config).pop("quantization_config", None)
        model.config.dtype = torch.bfloat16
        with torch.device("meta"):
            plain = factory.from_config(model.config, trust_remote_code=False)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
    save_model(plain, tokenizer, target)
    check_values(target, most_bytes=2**63)
