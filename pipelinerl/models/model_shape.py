"""`ModelShape`: the sizes of a language model from its directory alone, without its weights and without torch.

Shapes come from the headers of the safetensors files or, without such files, from a Llama decoder's config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype, model_type, stored_tensors, weight_files
from pipelinerl.models.decoder_config import read_config
from pipelinerl.models.directory_files import json_object, text_config
from trainer_contract.types import RoutingShape, WeightDType

_HEAD: Final = "lm_head.weight"
#: Last components of the names of embedding modules in the supported model families.
_EMBEDDINGS: Final = frozenset({"embed_tokens", "wte", "wpe", "embed_positions", "embed_in"})
#: Components that precede a layer's number in parameter names, as in `model.layers.3`.
_LAYERS: Final = frozenset({"layers", "h", "block", "blocks"})

#: Start of the name of a parameter inside a layer, with the layer's number.
_IN_LAYER: Final = re.compile(rf".*?\b(?:{'|'.join(sorted(_LAYERS))})\.(\d+)\.")
#: Names of the projection to queries, keys and values together.
_MERGED: Final = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
#: Model types whose layers all have a sliding window, and those whose windows keep whole sequences in the torch engine.
_WINDOWED: Final = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
_WHOLE: Final = frozenset({"qwen2"})
#: Names in configurations for the size of a recurrent state.
_STATES: Final = ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "linear_head_dim")

#: Names in configurations for the width, the number of attention heads and the number of layers.
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

BYTES: Final[Mapping[WeightDType, int]] = {WeightDType.FLOAT32: 4, WeightDType.BFLOAT16: 2, WeightDType.FLOAT16: 2}


class CacheBytes(NamedTuple):
    """Bytes that an engine keeps for a sequence.

    Attributes:
        token: keys and values of a token in all layers that keep whole sequences.
        in_window: keys and values of a token in layers that keep only their sliding window.
        window: the longest such window in tokens; None without such layers.
        states: states of recurrent layers, which do not depend on the sequence's length.
    """

    token: int
    in_window: int
    window: int | None
    states: int


class CacheSizes(NamedTuple):
    """Numbers that an engine keeps for a sequence, by the kind of layer.

    Attributes:
        token, in_window, window: as in `CacheBytes`; latents (MLA) in place of keys and values.
        convolutions: last inputs of all convolutions, in the model's dtype.
        recurrent: states of linear attention and state spaces, in fp32.
    """

    token: int
    in_window: int = 0
    window: int | None = None
    convolutions: int = 0
    recurrent: int = 0

    @property
    def whole(self) -> CacheSizes:
        """The sizes for an engine whose layers with a sliding window keep whole sequences."""
        return self._replace(token=self.token + self.in_window, in_window=0, window=None)

    def in_bytes(self, dtype: WeightDType) -> CacheBytes:
        """Return the sizes in bytes with keys and values in `dtype`."""
        states = self.convolutions * BYTES[dtype] + 4 * self.recurrent
        return CacheBytes(self.token * BYTES[dtype], self.in_window * BYTES[dtype], self.window, states)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model; `parameters` maps each parameter's name to its shape, with tied parameters listed once."""

    parameters: Mapping[str, tuple[int, ...]]
    dtype: WeightDType
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    cache: CacheSizes

    @property
    def count(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    @property
    def largest(self) -> int:
        return max(map(math.prod, self.parameters.values()))

    @property
    def linear(self) -> Mapping[str, tuple[int, ...]]:
        """The weight matrices inside the layers, as shapes by name."""
        return {
            name: shape
            for name, shape in self.parameters.items()
            if len(shape) == 2
            and name.endswith(".weight")
            and not _LAYERS.isdisjoint(name.split("."))
            and _module(name) not in _EMBEDDINGS
        }

    @property
    def experts(self) -> int:
        """The number of parameters of the experts, whose matrices are fused into tensors of three dimensions."""
        return sum(math.prod(each) for name, each in self.parameters.items() if len(each) == 3 and ".experts." in name)

    @property
    def matrices(self) -> int:
        """The number of parameters in tensors of at least two dimensions: autocast runs products with these in bf16."""
        return sum(math.prod(shape) for shape in self.parameters.values() if len(shape) >= 2)

    @property
    def multiplied(self) -> int:
        """The number of parameters that matrix products read: linear layers, experts and output layer, tied or not."""
        return sum(map(math.prod, self.linear.values())) + self.experts + self.vocab * self.hidden

    @property
    def products(self) -> int:
        """The number of parameters in linear layers and in the output layer if it is not tied; without experts."""
        outer = [shape for name, shape in self.parameters.items() if name.endswith(_HEAD)]
        return sum(map(math.prod, [*self.linear.values(), *outer]))

    @property
    def is_gated(self) -> bool:
        """True if the MLP multiplies two branches, as SwiGLU does."""
        return any("gate" in name for name in self.parameters)

    @property
    def normalises_heads(self) -> bool:
        """True if queries and keys are normalised (QK norm)."""
        return any("q_norm" in name for name in self.parameters)

    @property
    def has_merged_attention(self) -> bool:
        """True if queries, keys and values share one matrix."""
        return any("c_attn" in name or "qkv" in name for name in self.parameters)

    def adapted(self, targets: Collection[str] | None) -> list[tuple[int, ...]]:
        """Return the shapes of the matrices that LoRA adapts: those with a module name in `targets`; None means all."""
        return [shape for name, shape in self.linear.items() if targets is None or _module(name) in targets]


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in the directory `path`. Raises ModelError if its files are unreadable."""
    try:
        table, text = json_object(path / "config.json"), text_config(path)
        hidden, heads = _first(text, *_HIDDEN), _first(text, *_HEADS, default=1)  # a model may have no attention
        parameters = _parameters(path, tied=bool(table.get("tie_word_embeddings", "n_embd" in text)))
        layers = _first(text, *_DEPTHS, default=len(text.get("layers_block_type") or ()) or None)
        head_dim = int(text.get("head_dim") or hidden // heads)
        # The width of the MLP for one token; in a mixture of experts, summed over the active experts.
        expert, chosen = _widest(text.get("moe_intermediate_size")), _chosen_experts(text)
        if expert and chosen:
            width = int(expert) * int(chosen) + int(text.get("shared_expert_intermediate_size") or 0)
        else:
            dense = _widest(text.get("intermediate_size")) or text.get("n_inner") or 4 * hidden
            width = int(dense) * int(chosen or 1)
        shape = ModelShape(
            parameters=parameters,
            dtype=model_dtype(path),
            vocab=_first(text, "vocab_size"),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate=width,
            cache=_cache_sizes(parameters, text, layers=layers, queries=heads * head_dim),
        )
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"the sizes of the model in {path} cannot be read: {error}; copy it again") from error
    return shape


def _parameters(path: Path, *, tied: bool) -> dict[str, tuple[int, ...]]:
    files = weight_files(path)
    if not files:
        parameters = read_config(path).parameters
        return {name: parameter.shape for parameter in parameters for name in parameter.names}
    stored = {name: tensor.shape for file in files for name, tensor in stored_tensors(file).items()}
    found = fused_experts({name: shape for name, shape in stored.items() if len(shape) <= 3})
    return {name: shape for name, shape in found.items() if not (tied and name.endswith(_HEAD))}


def _cache_sizes(
    parameters: Mapping[str, tuple[int, ...]], text: Mapping[str, Any], *, layers: int, queries: int
) -> CacheSizes:
    """Return the cache's sizes from the shapes of the projections, module by module."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    shared = layers - int(text.get("num_kv_shared_layers") or 0)  # later layers read the keys of earlier ones
    for name, shape in parameters.items():
        place, (module, _, part) = _IN_LAYER.match(name), name.removesuffix(".weight").rpartition(".")
        is_text = not name.startswith(("model.vis", "vis", "audio"))
        if place is not None and int(place[1]) < layers and is_text and not name.endswith(".bias"):
            modules.setdefault(module, {})[part] = shape
    windows = _windows(text, layers)
    token = in_window = convolutions = recurrent = 0
    for module, own in modules.items():
        convolutions += sum(shape[0] * shape[2] for shape in own.values() if len(shape) == 3 and shape[1] == 1)
        if "dt_bias" in own or "A_log" in own:
            decay, nested = own.get("A_log", ()), text.get("linear_attn_config") or {}
            inner = own["v_proj"][0] if "v_proj" in own else own.get("out_proj", own.get("o_proj", (0, 0)))[1]
            named = {"linear_head_dim": nested.get("head_dim"), **text}
            # Mamba has one decay for each number of the state; else its size is the inner width times the state's.
            recurrent += math.prod(decay) if len(decay) == 2 else inner * _first(named, *_STATES)
        elif (place := _IN_LAYER.match(f"{module}.")) is not None and (number := int(place[1])) < shared:
            keys = _keys_and_values(own, queries)
            token, in_window = (token, in_window + keys) if windows[number] else (token + keys, in_window)
    window = int(text["sliding_window"]) if in_window else None
    return CacheSizes(token, in_window, window, convolutions, recurrent)


def _windows(text: Mapping[str, Any], layers: int) -> list[bool]:
    """Return which layers keep only their sliding window, as far as config.json says it."""
    kinds, every = text.get("layer_types"), text.get("sliding_window_pattern")
    is_whole = text.get("kv_lora_rank") is not None or text.get("model_type") in _WHOLE
    if not text.get("sliding_window") or is_whole:
        return [False] * layers
    if kinds is None and isinstance(every, int):
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if kinds is None:
        return [text.get("model_type") in _WINDOWED] * layers
    return [str(kind).endswith("sliding_attention") for kind in kinds]


def _keys_and_values(own: Mapping[str, tuple[int, ...]], queries: int) -> int:
    """Return the numbers that an attention module keeps for a token, 0 for other modules."""
    latent, both = own.get("kv_a_proj_with_mqa"), own.get("kv_proj")
    if latent or both:
        return (latent or both or (0,))[0]
    if keys := own.get("k_proj"):
        values = [shape[0] for name, shape in own.items() if name.startswith("v_proj")]
        return keys[0] + (sum(values) or keys[0])
    merged = next((own[name] for name in _MERGED if name in own), None)
    return max(merged) - queries if merged else 0


def _widest(size: Any) -> Any:
    """Return a size, or the largest one if there is one for each layer."""
    return max(size) if isinstance(size, list) else size


def _chosen_experts(text: Mapping[str, Any]) -> Any:
    """Return the number of experts that compute a token; None if the configuration names none."""
    value = next((text[name] for name in _CHOSEN if text.get(name)), None)
    return _widest(value)


def _first(table: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((table[name] for name in names if table.get(name) is not None), default)
    if value is None:
        raise ModelError(f"the model's config.json names no {' or '.join(names)}; use another model")
    return int(value)


def _module(name: str) -> str:
    return name.split(".")[-2]


#: Model types whose routing the torch engine records and the torch trainer replays (`torch_routers`).
REPLAYED: Final = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
#: Name of one expert's matrix in a model's files; Mixtral calls the matrices w1, w2 and w3.
_OF_EXPERT: Final = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_DOWN: Final = ("down_proj", "w2")
#: Names in configurations for the number of experts per layer.
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


#: Names in configurations for the number of experts that compute a token.
_CHOSEN: Final = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")


def mixture_of(path: Path) -> RoutingShape | None:
    """Return the mixture-of-experts sizes in config.json; None for a dense model. Raises ModelError if unreadable."""
    try:
        text = text_config(path)
        experts = next((int(text[name]) for name in _EXPERTS if text.get(name)), 0)
        layers = _layers(text) if experts > 1 else 0
        chosen = _chosen_experts(text)
        if layers and chosen is None:
            raise ModelError(
                f"{path / 'config.json'} names {experts} experts, and none of {', '.join(_CHOSEN)}; use another model"
            )
        return RoutingShape(layers, experts, int(chosen)) if layers else None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the experts of the model in {path} cannot be read from config.json: {error!r}; copy it again"
        ) from None


def replayed_routing(path: Path) -> RoutingShape:
    """Return the routing sizes of a model. Raises ModelError if its expert choices cannot be recorded and replayed."""
    shape, kind = mixture_of(path), model_type(path)
    if shape is None:
        raise ModelError(f"the model in {path}, of type {kind!r}, has no experts whose routing could be replayed")
    if kind not in REPLAYED:
        raise ModelError(
            f"routing can be replayed for {', '.join(sorted(REPLAYED))}, not for the routers of {kind!r} in {path}"
        )
    return shape


def fused_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Convert a directory's shapes by name to those of the loaded model, in which a layer's experts are two parameters.

    Files store expert matrices separately, as `….experts.3.gate_proj.weight`. The loaded parameters, which are trained,
    gathered and sent, are `gate_up_proj` [experts, 2 · width, hidden] and `down_proj` [experts, hidden, width].
    """
    fused: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            fused[name] = shape
            continue
        target = f"{found['experts']}.{'down_proj' if found['matrix'] in _DOWN else 'gate_up_proj'}"
        experts = max(fused.get(target, (0,))[0], int(found["number"]) + 1)
        rows, columns = shape
        fused[target] = (experts, rows if found["matrix"] in _DOWN else 2 * rows, columns)
    return fused


def _layers(text: Mapping[str, Any]) -> int:
    """Return the number of mixture-of-experts layers."""
    kinds = text.get("mlp_layer_types")
    if kinds is not None:
        return sum(kind == "sparse" for kind in kinds)
    every, dense = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or ())
    first = int(text.get("first_k_dense_replace") or 0)
    layers = range(int(text["num_hidden_layers"]))
    return sum(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in layers)
