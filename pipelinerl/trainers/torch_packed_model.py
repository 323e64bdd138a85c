"""`PackedModel`: a Hugging Face causal language model as a function from packed tokens to log-probs.

One module, so that whatever wraps it (DDP, FSDP, DeepSpeed) sees a single forward. Only the positions asked for reach
the output layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model
from pipelinerl.numerics.torch_logprobs import LOGITS_AT_ONCE, token_logprobs
from pipelinerl.trainers.torch_segments import IMPLEMENTATION, SegmentPlan
from trainer_contract.errors import SpecError

#: Differences of logits that the probe accepts: rounding, far below what a leak between segments causes.
_PROBE_TOLERANCE: Final = 1e-3


@final
class PackedModel(nn.Module):
    """Log-probs of packed tokens under a causal language model."""

    def __init__(self, model: PreTrainedModel, *, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.model = model
        self._logits_at_once = logits_at_once

    def forward(self, token_ids: Tensor, segments: SegmentPlan, where: Tensor, temperatures: Tensor | None) -> Tensor:
        """Log-probs f32 [N] of the tokens at `where`.

        Args:
            token_ids: i64 [2, T], the tokens and their positions.
            segments: plan of the packing.
            where: i64 [N], indices of tokens that are not the first of their segment.
            temperatures: f32 [N], or None for 1 everywhere.
        """
        tokens, positions = token_ids
        hidden = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], segments=segments, use_cache=False
        ).last_hidden_state.squeeze(0)
        return token_logprobs(
            hidden.index_select(0, where - 1),
            self.model.get_output_embeddings(),
            tokens.index_select(0, where),
            temperatures,
            vocab_size=self.model.config.get_text_config().vocab_size,
            logits_at_once=self._logits_at_once,
        )

    @torch.no_grad()
    def probe(self, device: torch.device) -> None:
        """Run the same segment twice in one row, to find out whether this architecture can be packed at all.

        Raises:
            SpecError: the second copy differs from the first (a layer looks across the boundary), or the model changes
                logits after its output layer, which `forward` would miss.
        """
        tokens = torch.tensor([[1, 2, 3, 1, 2, 3]], device=device) % self.model.config.get_text_config().vocab_size
        positions = np.array([0, 1, 2, 0, 1, 2], dtype=np.int32)
        arguments = {
            "input_ids": tokens,
            "position_ids": torch.from_numpy(positions).to(device, torch.int64)[None],
            "segments": SegmentPlan.of(positions, device),
            "use_cache": False,
        }
        logits = self.model(**arguments).logits[0]
        name = type(self.model).__name__
        if (logits[:3] - logits[3:]).abs().max() > _PROBE_TOLERANCE * logits.abs().max():
            raise SpecError(f"{name} mixes tokens of different segments outside attention: it cannot train packed")
        head = self.model.get_output_embeddings()
        direct = head(self.model.base_model(**arguments).last_hidden_state.squeeze(0))
        if (logits - direct).abs().max() > _PROBE_TOLERANCE * logits.abs().max():
            raise SpecError(f"{name} changes logits after its output layer, which is not supported; use another model")


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration in a model directory. Raises SpecError when there is none."""
    if not (path / "config.json").is_file():
        raise SpecError(f"model_path must be a Hugging Face model directory with config.json, got {path}")
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"the configuration in {path} cannot be read: {error}") from error


def load_for_training(path: Path, *, gradient_checkpointing: bool) -> PreTrainedModel:
    """The model in a directory, with fp32 weights and no dropout.

    Raises:
        SpecError: the directory is incomplete, or the architecture is not a causal language model.
    """
    try:
        model = load_model(path, attention=IMPLEMENTATION)
    except (ModelError, ValueError, KeyError) as error:
        raise SpecError(f"model_path: {error}") from error
    if gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    model.train(gradient_checkpointing)  # checkpointing works in train mode only; otherwise eval mode, without dropout
    return model
