"""`PackedValueModel`, the layers of a causal language model with a scalar head in place of its output layer.

A value-model directory has `value_head.safetensors` (`weight` [1, d], `bias` [1], fp32). Without this file the head is
0: all first values are 0, and the first advantages equal those without a critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelinerl.models.checkpoint import VALUE_HEAD_FILE
from pipelinerl.models.weight_reader import WeightReader
from pipelinerl.trainers.torch.packed.attention import AttentionPlan
from pipelinerl.trainers.torch.packed.padded import PaddedPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Reading
from pipelinerl.trainers.torch.packed_model import (
    computing_in,
    hidden_states,
    load_for_training,
    packs,
    persistent_buffers,
    probe_packing,
)
from trainer_contract.errors import SpecError
from trainer_contract.types import HeadMeasure

#: Prefix of the names of the value head's parameters.
_HEAD: Final = "value_head."


class PackedValueModel(nn.Module):
    """A model that predicts the values of the states before packed tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.packs = packs(model)
        self.routing = None
        self._buffers_saved = persistent_buffers(model)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def load(cls, path: Path, *, gradient_checkpointing: bool) -> tuple[PackedValueModel, WeightReader | None]:
        """Load the directory of a value model or a language model. Raises SpecError if it is incomplete."""
        model, reader = load_for_training(path, gradient_checkpointing=gradient_checkpointing, part="trunk")
        made = cls(model)
        if (path / VALUE_HEAD_FILE).is_file():
            try:
                made.value_head.load_state_dict(load_file(path / VALUE_HEAD_FILE))
            except RuntimeError as error:
                raise SpecError(f"{path / VALUE_HEAD_FILE} does not fit the model in its directory: {error}") from error
        return made, reader

    def forward(
        self,
        token_ids: Tensor,
        segments: AttentionPlan | PaddedPlan,
        before: Reading,
        chosen: Tensor,
        temperatures: Tensor | None,
        measures: tuple[HeadMeasure, ...] = (),
        routed: Tensor | None = None,
    ) -> Tensor:
        """Return values f32 [1, N] of the states before the chosen tokens; arguments as in `PackedModel.forward`."""
        del chosen, temperatures, measures, routed
        hidden = before(hidden_states(self.model, token_ids, segments))
        with torch.autocast(hidden.device.type, enabled=False):
            # `clone` is needed for the same reason as in `PackedModel.forward`.
            return cast(Tensor, self.value_head(hidden.float())).squeeze(-1)[None].clone()

    def probe(self, device: torch.device, products: torch.dtype = torch.float32) -> None:
        """Run `probe_packing` if the model trains packed; raise its SpecError."""
        if self.packs:
            with computing_in(products, device):
                probe_packing(self.model, device, products)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        for name, parameter in self.value_head.named_parameters():
            yield f"{_HEAD}{name}", parameter

    def save(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        head = {name: weights[f"{_HEAD}{name}"] for name, _ in self.value_head.named_parameters()}
        trunk = {name: weight for name, weight in weights.items() if not name.startswith(_HEAD)}
        self.model.save_pretrained(path, state_dict={**self._buffers_saved, **trunk})
        save_file(head, path / VALUE_HEAD_FILE)
