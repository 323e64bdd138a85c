"""`PackedModel`, a Hugging Face causal language model as a function from packed tokens to log-probs or values.

It is one module, so wrappers (DDP, FSDP, DeepSpeed) see one forward. Only requested positions reach the output layer.

A model that computes packed segments as transformers computes them alone trains packed; any other trains as padded
rows, with transformers' own attention (`choose_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl.errors import ModelError
from pipelinerl.models import torch_miniature, torch_routers
from pipelinerl.models.checkpoint import VALUE_HEAD_FILE, Part, load_model, load_structure, replace_attention
from pipelinerl.models.torch_miniature import Computed, texts_of
from pipelinerl.models.weight_reader import WeightReader
from pipelinerl.numerics import torch_batch_invariant
from pipelinerl.numerics.torch_logprobs import token_predictions
from pipelinerl.trainers.torch.experts import follow_autocast
from pipelinerl.trainers.torch.packed.attention import IMPLEMENTATION, AttentionPlan, OpaquePlan, attend
from pipelinerl.trainers.torch.packed.segments import PaddedPlan, SegmentPlan, last_hidden
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
#: Factor of the hidden states with which the probe looks for a change of logits after the output layer: such logits are
#: large enough for every cap to show.
_LARGE: Final = 64.0

#: Prefix of the names of the value head's parameters.
_HEAD: Final = "value_head."
#: Attention implementations of transformers in the order of preference; None is the model's own choice.
_ATTENTIONS: Final = (IMPLEMENTATION, None, "eager")

#: Segments of the packing probe: two of 6 tokens, longer than a miniature's windows and chunks.
_PROBED: Final = np.tile(np.arange(6, dtype=np.int32), 2)


class PackedModel(nn.Module):
    """A causal language model that predicts the log-probs of packed tokens."""

    def __init__(self, model: PreTrainedModel, *, kernels: Kernels = Kernels.FAST) -> None:
        super().__init__()
        self.model = model
        self.packs = packs(model)
        self._kernels = kernels
        self.compiles_predictions = False
        self._buffers_saved = persistent_buffers(model)
        self._whole_head: _WholeHead | None = None
        self.routing = torch_routers.shape_of(model) if self.packs else None
        self._replay = None if self.routing is None else torch_routers.ReplayedRouters(model)

    @property
    def _head(self) -> Callable[[Tensor], Tensor]:
        return self._whole_head or cast(nn.Module, self.model.get_output_embeddings())

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
        """Return f32 [1 + M, N]: log-probs of the N `chosen` tokens, then M `measures` of their distributions.

        Args:
            token_ids: i64 [2, K], the tokens and their positions.
            segments: plan of attention over the packed segments, or of padded rows.
            before: reads, for each of the N chosen tokens, the hidden state of the token before it.
            chosen: i64 [N], ids of the tokens whose log-probs are returned.
            temperatures: f32 [N], or None for 1 everywhere.
            measures: properties of each distribution, such as its entropy, to return as well.
            routed: integers [K, layers, top_k], the experts that compute the tokens; None lets the routers choose.
        """
        if self._replay is not None:
            self._replay.tell(routed)
        hidden = hidden_states(trunk_of(self.model), token_ids, segments)
        predictions = token_predictions(
            before(hidden),
            self._head,
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
        """Check that a packed model separates segments, and find how it computes logits from hidden states.

        `products` is the dtype of matmuls in this check. Raises SpecError if a layer mixes segments; if logits cannot
        be computed apart from the layers; or if kernels should be batch-invariant but are not.
        """
        if self._replay is not None:
            self._replay.tell(None)
        trunk, tokens = trunk_of(self.model), _probed_tokens(self.model)[0][None].to(device)
        with computing_in(products, device):
            if self.packs:
                probe_packing(trunk, device, products)
                plan = OpaquePlan(SegmentPlan.of(_PROBED, device))
                inputs = {"input_ids": tokens, "position_ids": _probed_tokens(self.model)[1][None].to(device)}
                logits = self.model(**inputs, segments=plan, use_cache=False).logits[0]
                hidden = last_hidden(trunk, **inputs, segments=plan)[0]
            else:
                logits = self.model(input_ids=tokens, use_cache=False).logits[0]
                hidden = last_hidden(trunk, input_ids=tokens)[0]
            whole, large = _WholeHead(self.model), _LARGE * hidden
            with suppress(SpecError):  # raised if OPT, whose forward skips a part of its trunk, attends after all
                if not _differ(whole(hidden), logits, products) and _differ(self._head(large), whole(large), products):
                    self._whole_head = whole
            is_apart = not _differ(self._head(hidden), logits, products)
        if not is_apart:
            name = type(self.model).__name__
            raise SpecError(f"{name} does not compute its logits from its last hidden states alone; use another model")
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
            logits = self._head(hidden_states(trunk_of(self.model), token_ids, segments))
        return logits[:3].float().cpu().numpy().tobytes()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under Hugging Face's names, tied ones once."""
        yield from self.model.named_parameters()

    def save(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        self.model.save_pretrained(path, state_dict={**self._buffers_saved, **weights})


class PackedValueModel(nn.Module):
    """The layers of a causal language model with a scalar head in place of its output layer.

    It predicts the values of the states before packed tokens. Its directory has `value_head.safetensors` (`weight`
    [1, d], `bias` [1], fp32). Without this file the head is 0: all first values are 0, and the first advantages equal
    those without a critic.
    """

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
    """Return the buffers that a model directory stores; before a sharded model's first pass, which `state_dict` would
    disturb.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def packs(model: PreTrainedModel) -> bool:
    """Return whether a model of `load_for_training` computes packed segments; if not, it computes padded rows."""
    return bool(model.config._attn_implementation == IMPLEMENTATION)


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a causal language model without its output layer."""
    # The prefix that names this part in transformers names nothing in Llama 4.
    return cast(PreTrainedModel, getattr(model, "model", model) if model.base_model is model else model.base_model)


class _Stub:
    """The output of a model's layers, with only the hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _WholeHead:
    """Maps hidden states [n, d] to logits [n, V] by the model's own forward, with its scale or cap."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._trunk = trunk_of(model)

    def __call__(self, hidden: Tensor) -> Tensor:
        vars(self._trunk)["forward"] = lambda *_, **__: _Stub(hidden[None])
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            del vars(self._trunk)["forward"]
        return logits


def hidden_states(trunk: nn.Module, token_ids: Tensor, segments: AttentionPlan | PaddedPlan) -> Tensor:
    """Return the last hidden states [K, d] of packed tokens; `token_ids` i64 [2, K] are tokens and positions."""
    tokens, positions = token_ids
    if isinstance(segments, PaddedPlan):
        return segments.hidden_states(trunk, tokens)
    plan = OpaquePlan(segments)
    return last_hidden(trunk, input_ids=tokens[None], position_ids=positions[None], segments=plan).squeeze(0)


def computing_in(products: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which matmuls use the dtype `products`, by autocast unless the dtype is fp32.

    Autocast's cache of rounded weights is off, so with checkpointing only one layer's rounded weights exist at once.
    Each use of a weight then has its own gradient, and these are summed in fp32.
    """
    mixed = products is not torch.float32
    return torch.autocast(device.type, dtype=products if mixed else None, enabled=mixed, cache_enabled=False)


@torch.no_grad()
def probe_packing(trunk: PreTrainedModel, device: torch.device, products: torch.dtype = torch.float32) -> None:
    """Run the model on a row with two copies of a segment. Raises SpecError if their results differ, or if a mask is
    neither causal nor a sliding window.
    """
    tokens, positions = _probed_tokens(trunk).to(device)
    plan = OpaquePlan(SegmentPlan.of(_PROBED, device), checked=positions)
    first, second = (
        last_hidden(trunk, input_ids=tokens[None], position_ids=positions[None], segments=plan).squeeze(0).chunk(2)
    )
    if _differ(first, second, products):
        raise SpecError(
            f"{type(trunk).__name__} mixes tokens of different segments outside attention: it cannot train packed"
        )


def _probed_tokens(model: PreTrainedModel) -> Tensor:
    tokens = (_PROBED + 1) % model.config.get_text_config().vocab_size
    return torch.from_numpy(np.stack((tokens, _PROBED)).astype(np.int64))


def _differ(one: Tensor, other: Tensor, products: torch.dtype) -> bool:
    return not bool((one - other).abs().max() <= _PROBE_TOLERANCE[products] * other.abs().max())


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
        attention = choose_rows(model).attention
        _use_attention(model, attention)
        reader = WeightReader.of(path, model)
        if reader is None:
            model = load_model(path, part=part)
            _use_attention(model, attention)
        else:
            for place, module in model.named_modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    if buffer.is_meta:
                        read = reader.whole(f"{place}.{name}" if place else name)
                        setattr(module, name, read.to(buffer.dtype, copy=True))
    except (ModelError, ValueError, KeyError) as error:
        raise SpecError(f"model_path: {error}") from error
    follow_autocast(model)
    if gradient_checkpointing:
        _recompute_layers(model)
    return model, reader


class RowChoice(NamedTuple):
    """How the trainer computes a model.

    Attributes:
        attention: the name of an attention in transformers, `IMPLEMENTATION` for packed rows; None for the model's own.
        was_tried: False if no miniature could be tried, as `torch_miniature` explains.
    """

    attention: str | None
    was_tried: bool

    @property
    def packs(self) -> bool:
        return self.attention == IMPLEMENTATION


def choose_rows(skeleton: PreTrainedModel) -> RowChoice:
    """Return packed rows if they equal transformers' results, else padded rows. Raises ModelError."""
    refusals = []
    for attention in _ATTENTIONS:
        part = "the torch trainer" + ("" if attention == IMPLEMENTATION else f" with {attention or 'own'} attention")
        try:
            tried = torch_miniature.refuse_different(skeleton, part, partial(_computed, attention=attention))
        except ModelError as error:
            refusals.append(error)
        else:
            return RowChoice(attention, tried)
    raise refusals[1]


def _use_attention(model: PreTrainedModel, attention: str | None) -> None:
    if attention is not None:
        replace_attention(model, attention)


def _computed(model: PreTrainedModel, *, attention: str | None) -> list[Computed]:
    """Compute the miniature's texts as one micro-batch, shared beginnings once."""
    _use_attention(model, attention)
    follow_autocast(model)
    device, packed = torch.device("cpu"), None if model.get_output_embeddings() is None else PackedModel(model)
    if packed is not None:
        packed.probe(device)
    elif packs(model):
        probe_packing(model, device)
    plan_of = SegmentPlan.of if packs(model) else PaddedPlan.of
    texts = texts_of(model)
    lengths = np.array([len(text) for text in texts])
    batch = made_up_batch(lengths, vocab_size=1)
    batch = replace(batch, token_ids=np.concatenate(texts).astype(np.int32))
    if packed is not None:
        values = predict(packed, PassSetting(device, plan_of), batch, batch.loss_mask)[0]
        return [Computed(text, part) for text, part in zip(texts, values.split((lengths - 1).tolist()), strict=True)]
    distinct = Distinct.of(batch)
    tokens = np.stack((batch.token_ids, batch.position_ids))[:, distinct.kept].astype(np.int64)
    segments = plan_of(batch.position_ids, device, distinct)
    hidden = hidden_states(model, torch.from_numpy(tokens), segments)[torch.from_numpy(distinct.place)]
    return [Computed(text, part) for text, part in zip(texts, hidden.split(lengths.tolist()), strict=True)]


def _recompute_layers(model: PreTrainedModel) -> None:
    """Recompute layers in backward. transformers' own switch needs train mode, with dropout and router noise."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SpecError(
            f"{type(model).__name__} has no layers that the backward pass can recompute; set "
            "trainer.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
