"""`PackedModel`, a Hugging Face causal language model as a function from packed tokens to log-probs.

It is one module, so wrappers (DDP, FSDP, DeepSpeed) see one forward. Only requested positions reach the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl.errors import ModelError
from pipelinerl.models import torch_miniature, torch_routers
from pipelinerl.models.checkpoint import Part, load_model, load_structure, replace_attention
from pipelinerl.models.torch_miniature import Computed, texts_of
from pipelinerl.models.weight_reader import WeightReader
from pipelinerl.numerics import torch_batch_invariant
from pipelinerl.numerics.torch_logprobs import token_predictions
from pipelinerl.trainers.torch.experts import follow_autocast
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION, AttentionPlan, OpaquePlan, attend
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct, Reading
from pipelinerl.trainers.torch.passes import PassSetting, made_up_batch, predict
from trainer_contract.errors import SpecError
from trainer_contract.types import HeadMeasure, Kernels

#: Number of parameters from which a trainer on a GPU compiles the layers. Compilation takes half a minute, which only
#: larger models make up for.
COMPILED_FROM: Final = 10**8

#: Relative tolerance of the packing probe, by dtype: above rounding errors, and far below the effect of a leak between
#: segments.
_PROBE_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@final
class PackedModel(nn.Module):
    """A causal language model that predicts the log-probs of packed tokens."""

    def __init__(self, model: PreTrainedModel, *, kernels: Kernels = Kernels.FAST) -> None:
        super().__init__()
        self.model = model
        self._kernels = kernels
        self.compiles_predictions = False
        self._buffers_saved = persistent_buffers(model)
        self.routing = torch_routers.shape_of(model)
        self._replay = None if self.routing is None else torch_routers.ReplayedRouters(model)

    def forward(
        self,
        token_ids: Tensor,
        segments: AttentionPlan,
        before: Reading,
        chosen: Tensor,
        temperatures: Tensor | None,
        measures: tuple[HeadMeasure, ...] = (),
        routed: Tensor | None = None,
    ) -> Tensor:
        """Return f32 [1 + M, N]: log-probs of the N `chosen` tokens, then M `measures` of their distributions.

        Args:
            token_ids: i64 [2, K], the tokens and their positions.
            segments: plan of attention over the packed segments.
            before: reads, for each of the N chosen tokens, the hidden state of the token before it.
            chosen: i64 [N], ids of the tokens whose log-probs are returned.
            temperatures: f32 [N], or None for 1 everywhere.
            measures: properties of each distribution, such as its entropy, to return as well.
            routed: integers [K, layers, top_k], the experts that compute the tokens; None lets the routers choose.
        """
        if self._replay is not None:
            self._replay.tell(routed)
        hidden = hidden_states(self.model.base_model, token_ids, segments)
        predictions = token_predictions(
            before(hidden),
            self.model.get_output_embeddings(),
            chosen,
            temperatures,
            vocab_size=self.model.config.get_text_config().vocab_size,
            measures=measures,
            compiled=self.compiles_predictions,
        )
        # `clone`, because `fully_shard` attaches a hook to the result; on a view, an in-place operation would drop the
        # hook.
        return predictions.clone()

    @torch.no_grad()
    def probe(self, device: torch.device, products: torch.dtype = torch.float32) -> None:
        """Check that the architecture supports packing, and that its output layer is its last operation.

        `products` is the dtype of matmuls in this check. Raises SpecError if a layer mixes segments; if the model
        changes logits after its output layer, which `forward` would miss; or if kernels should be batch-invariant but
        are not.
        """
        if self._replay is not None:
            self._replay.tell(None)
        with computing_in(products, device):
            token_ids, segments = probe_packing(cast(PreTrainedModel, self.model.base_model), device, products)
            tokens, positions = token_ids[:, None]
            logits = self.model(input_ids=tokens, position_ids=positions, segments=segments, use_cache=False).logits[0]
            direct = self.model.get_output_embeddings()(hidden_states(self.model.base_model, token_ids, segments))
        if (logits - direct).abs().max() > _PROBE_TOLERANCE[products] * logits.abs().max():
            name = type(self.model).__name__
            raise SpecError(f"{name} changes logits after its output layer, which is not supported; use another model")
        if self._kernels is Kernels.BATCH_INVARIANT and not torch_batch_invariant.probed(
            lambda count: self._probed_in_batch(count, device, products)
        ):
            raise SpecError(
                f"{type(self.model).__name__} computes a token differently in other batches on this machine; leave out "
                "model.kernels"
            )

    def _probed_in_batch(self, count: int, device: torch.device, products: torch.dtype) -> bytes:
        """Pack a segment with a second one of `count` tokens, and return the first segment's logits as bytes."""
        positions = np.concatenate((np.arange(3), np.arange(count))).astype(np.int32)
        tokens = (positions + 1) % self.model.config.get_text_config().vocab_size
        token_ids = torch.from_numpy(np.stack((tokens, positions)).astype(np.int64)).to(device)
        with computing_in(products, device):
            segments = SegmentPlan.of(positions, device, kernels=self._kernels)
            hidden = hidden_states(self.model.base_model, token_ids, segments)
            logits = self.model.get_output_embeddings()(hidden)
        return logits[:3].float().cpu().numpy().tobytes()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under Hugging Face's names, tied ones once."""
        yield from self.model.named_parameters()

    def save(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a Hugging Face model directory with these parameter values."""
        self.model.save_pretrained(path, state_dict={**self._buffers_saved, **weights})


def compile_layers(model: nn.Module, *, gradient_checkpointing: bool) -> None:
    """Let torch compile each layer (without its attention) and the loss's softmax during the first pass.

    The compiled code works for any number of tokens. Compilation fuses norms, rotations, gates and conversions into few
    kernels, with the same rounding. Torch cannot compile across activation checkpoints; with checkpointing, each child
    module of a layer is compiled separately.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))
    if isinstance(model, PackedModel):
        model.compiles_predictions = True
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for part in layer.children() if gradient_checkpointing else (layer,):
                part.compile(dynamic=True, options={"emulate_precision_casts": True})


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a model directory stores.

    Call this before a sharded model's first pass, because later `state_dict` would free gathered parameters.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def hidden_states(trunk: nn.Module, token_ids: Tensor, segments: AttentionPlan) -> Tensor:
    """Return the last hidden states [K, d] of packed tokens; `token_ids` i64 [2, K] are tokens and positions."""
    tokens, positions = token_ids
    plan = OpaquePlan(segments)
    output = trunk(input_ids=tokens[None], position_ids=positions[None], segments=plan, use_cache=False)
    hidden: Tensor | None = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise SpecError(f"{type(trunk).__name__} has no layers that transformers runs without its output layer")
    return hidden.squeeze(0)


def computing_in(products: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which matmuls use the dtype `products`, by autocast unless the dtype is fp32.

    Autocast's cache of rounded weights is off, so with checkpointing only one layer's rounded weights exist at once.
    Each use of a weight then has its own gradient, and these are summed in fp32.
    """
    mixed = products is not torch.float32
    return torch.autocast(device.type, dtype=products if mixed else None, enabled=mixed, cache_enabled=False)


@torch.no_grad()
def probe_packing(
    trunk: PreTrainedModel, device: torch.device, products: torch.dtype = torch.float32
) -> tuple[Tensor, SegmentPlan]:
    """Run the model on a row with two copies of a segment; return the row's tokens and plan.

    Raises SpecError if the results for the two copies differ.
    """
    positions = np.array([0, 1, 2, 0, 1, 2], dtype=np.int32)
    tokens = (positions + 1) % trunk.config.get_text_config().vocab_size
    token_ids = torch.from_numpy(np.stack((tokens, positions)).astype(np.int64)).to(device)
    segments = SegmentPlan.of(positions, device)
    hidden = hidden_states(trunk, token_ids, segments)
    if (hidden[:3] - hidden[3:]).abs().max() > _PROBE_TOLERANCE[products] * hidden.abs().max():
        name = type(trunk).__name__
        raise SpecError(f"{name} mixes tokens of different segments outside attention: it cannot train packed")
    return token_ids, segments


def load_config(path: Path) -> PreTrainedConfig:
    """Load the configuration of a model directory without running its code. Raises SpecError if there is none."""
    if not (path / "config.json").is_file():
        raise SpecError(f"model_path must be a Hugging Face model directory with config.json, got {path}")
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"the configuration in {path} cannot be read: {error}") from error


def hold(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the storage of a parameter, which may be on the meta device; all references to it stay valid."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    else:
        parameter.data = values


def load_for_training(
    path: Path, *, gradient_checkpointing: bool, part: Part = "causal_lm"
) -> tuple[PreTrainedModel, WeightReader | None]:
    """Load a directory's model, or only the `part` "trunk", for training: in fp32 and eval mode. Raises SpecError.

    Returns a model on the meta device and the reader of its parameters, or a loaded model and None.
    """
    try:
        model = load_structure(path, part=part)
        refuse_different(model)
        replace_attention(model, IMPLEMENTATION)
        reader = WeightReader.of(path, model)
        if reader is None:
            model = load_model(path, part=part)
            replace_attention(model, IMPLEMENTATION)
        else:
            _read_buffers(model, reader)
    except (ModelError, ValueError, KeyError) as error:
        raise SpecError(f"model_path: {error}") from error
    follow_autocast(model)
    if gradient_checkpointing:
        _recompute_layers(model)
    return model, reader


def refuse_different(skeleton: PreTrainedModel) -> bool:
    """Raise ModelError if the trainer would not compute this model as transformers does.

    The weights of `skeleton` are not used. Return False if this could not be tried, as `torch_miniature` explains.
    """
    return torch_miniature.refuse_different(skeleton, "the torch trainer", _computed)


def _computed(model: PreTrainedModel) -> list[Computed]:
    """Compute the miniature's texts in one packed row, shared beginnings once; first probe what has its own message."""
    replace_attention(model, IMPLEMENTATION)
    follow_autocast(model)
    device, packed = torch.device("cpu"), None if model.get_output_embeddings() is None else PackedModel(model)
    if packed is None:
        probe_packing(model, device)
    else:
        packed.probe(device)
    texts = texts_of(model)
    lengths = np.array([len(text) for text in texts])
    batch = made_up_batch(lengths, vocab_size=1)
    batch = replace(batch, token_ids=np.concatenate(texts).astype(np.int32))
    if packed is not None:
        values = predict(packed, PassSetting(device), batch, batch.loss_mask)[0]
        return [Computed(text, part) for text, part in zip(texts, values.split((lengths - 1).tolist()), strict=True)]
    distinct = Distinct.of(batch)
    tokens = np.stack((batch.token_ids, batch.position_ids))[:, distinct.kept].astype(np.int64)
    segments = SegmentPlan.of(batch.position_ids, device, distinct)
    hidden = hidden_states(model, torch.from_numpy(tokens), segments)[torch.from_numpy(distinct.place)]
    return [Computed(text, part) for text, part in zip(texts, hidden.split(lengths.tolist()), strict=True)]


def _recompute_layers(model: PreTrainedModel) -> None:
    """Make the backward pass recompute each layer. Raises SpecError if transformers marks no layer for this.

    transformers' own switch needs train mode, which also turns on dropout and routers' noise; eval mode has neither.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SpecError(
            f"{type(model).__name__} has no layers that the backward pass can recompute; set "
            "trainer.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _read_buffers(model: PreTrainedModel, reader: WeightReader) -> None:
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, reader.whole(f"{path}.{name}" if path else name).to(buffer.dtype, copy=True))
