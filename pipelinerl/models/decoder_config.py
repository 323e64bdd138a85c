"""`DecoderConfig`: a Llama-family decoder's configuration, read from `config.json`, and its parameters.

One description covers Llama, Mistral, Qwen2 and Qwen3, which differ only in biases and norms, and OLMo 2, OLMo 3 and
Gemma 3, which also place norms elsewhere and alternate between layers with a sliding window and layers without.
Unsupported settings (other rotary scalings, experts, quantisation) are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype
from pipelinerl.models.directory_files import json_object, text_config

#: Prefix of the names of parameters inside layers; `*` stands for the layer's number.
LAYER: Final = "model.layers.*."
EMBEDDING: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
#: A value model has these parameters in place of the output layer.
VALUE_WEIGHT: Final = "value_head.weight"
VALUE_BIAS: Final = "value_head.bias"

#: For each model_type, whether queries, keys and values have biases (None: as `attention_bias` in config.json says),
#: and whether queries and keys have norms. These families have the same names of parameters in memory as in files.
FAMILIES: Final[Mapping[str, tuple[bool | None, bool]]] = {
    "llama": (None, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (None, True),
    "olmo2": (None, True),
    "olmo3": (None, True),
    "gemma3_text": (None, True),
}
#: The families that norm the results of attention and MLP: after them only, or also before them (Gemma 3).
_POST_NORMS: Final = frozenset({"olmo2", "olmo3"})
_GEMMA: Final = "gemma3_text"
#: The period of layers without a sliding window, by family. The layers with one have no rotary scaling.
_PATTERNS: Final = {_GEMMA: 6, "olmo3": 4}
#: Widths of heads that are not hidden / heads, unless config.json names them.
_HEAD_DIMS: Final = {"qwen3": 128, _GEMMA: 256}
#: Each family's activation, if it is not `silu`.
_ACTIVATIONS: Final = {_GEMMA: "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding; `factor` divides all frequencies (`linear` scaling), or only low ones (`llama3`).

    With `betas`, the interpolation is that of `yarn` (Peng et al. 2023), which also multiplies cos and sin by `scale`.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    betas: tuple[float, float] | None = None
    scale: float = 1.0

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return radians per position, f32 [head_dim / 2]."""
        plain = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.original_positions is None:
            return (plain / self.factor).astype(np.float32)
        if self.betas is not None:
            # The indices of the frequencies that turn so often within the original context.
            turns = self.original_positions / (2 * math.pi * np.array(self.betas))
            fast, slow = head_dim * np.log(turns) / (2 * math.log(self.theta))
            low, high = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
            ramp = (np.arange(head_dim // 2) - low) / (high - low if high > low else 0.001)
            kept = 1 - np.clip(ramp, 0.0, 1.0)
            return (plain * (kept + (1 - kept) / self.factor)).astype(np.float32)
        # Frequencies that turn more than `high` times within the original context are kept. Those that turn fewer than
        # `low` times are divided by `factor`; between these bounds the two are interpolated.
        turns = self.original_positions * plain / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (plain * (kept + (1 - kept) / self.factor)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or the stack of one parameter over all layers.

    Attributes:
        name: the name in Hugging Face's files; a `*` stands for the layer's number.
        shape: the shape within one layer; a matrix is [out, in], as in Hugging Face's files.
        axes: the mesh axis (`tensor`, `fsdp` or None) along which each dimension of `shape` is divided.
        layers: the number of layers stacked along a leading dimension; None for a parameter outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    layers: int | None = None

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """`shape`, with a leading dimension for the layers if the parameter is inside the layers."""
        return self.shape if self.layers is None else (self.layers, *self.shape)

    @property
    def stacked_axes(self) -> tuple[str | None, ...]:
        """The mesh axis of each dimension of `stacked_shape`; None for the dimension of layers."""
        return self.axes if self.layers is None else (None, *self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face's names of the parameter, layer by layer."""
        return (self.name,) if self.layers is None else tuple(self.name_at(layer) for layer in range(self.layers))

    def name_at(self, layer: int) -> str:
        return self.name.replace("*", str(layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder, under shortened Hugging Face names."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: Rotary
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    window: int | None = None
    """Number of tokens that layers in `slides` attend to; None without such layers."""
    slides: tuple[bool, ...] = ()
    local_rotary: Rotary | None = None
    """Rotary embedding of the layers in `slides`, if it is another one."""
    query_scale: float | None = None
    """Factor of the scores; None for head_dim ** -0.5."""
    scalar_head: bool = False
    """True for a value model, whose head maps each hidden state to one number in place of the output layer."""

    @property
    def is_gemma(self) -> bool:
        """True for Gemma, whose norms multiply by 1 + weight, and whose embeddings are scaled by √hidden."""
        return self.model_type == _GEMMA

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of the norms before attention, after it, before the MLP and after it; "" for none."""
        if self.model_type in _POST_NORMS:
            return "", "post_attention_layernorm", "", "post_feedforward_layernorm"
        if self.is_gemma:
            names = "input", "post_attention", "pre_feedforward", "post_feedforward"
            return tuple(f"{name}_layernorm" for name in names)
        return "input_layernorm", "", "post_attention_layernorm", ""

    @property
    def whole_qk_norm(self) -> bool:
        """True if norms of queries and keys are over all heads together."""
        return self.model_type in _POST_NORMS

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, in this order: embedding, those inside the layers (stacked over all layers), norm, head."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        table = [Parameter(EMBEDDING, (self.vocab, self.hidden), ("tensor", "fsdp"))]

        def within(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
            table.append(Parameter(LAYER + name, shape, axes, self.layers))

        def linear(name: str, rows: int, columns: int, axes: tuple[str, str], *, bias: bool) -> None:
            within(f"{name}.weight", (rows, columns), axes)
            if bias:
                within(f"{name}.bias", (rows,), (axes[0] if axes[0] == "tensor" else None,))

        into, out_of = ("tensor", "fsdp"), ("fsdp", "tensor")
        linear("self_attn.q_proj", wide, self.hidden, into, bias=self.qkv_bias)
        linear("self_attn.k_proj", narrow, self.hidden, into, bias=self.qkv_bias)
        linear("self_attn.v_proj", narrow, self.hidden, into, bias=self.qkv_bias)
        linear("self_attn.o_proj", self.hidden, wide, out_of, bias=self.output_bias)
        if self.qk_norm:
            normed = (wide, narrow) if self.whole_qk_norm else (self.head_dim, self.head_dim)
            within("self_attn.q_norm.weight", normed[:1], (None,))
            within("self_attn.k_norm.weight", normed[1:], (None,))
        linear("mlp.gate_proj", self.intermediate, self.hidden, into, bias=self.mlp_bias)
        linear("mlp.up_proj", self.intermediate, self.hidden, into, bias=self.mlp_bias)
        linear("mlp.down_proj", self.hidden, self.intermediate, out_of, bias=self.mlp_bias)
        for name in filter(None, self.norms):
            within(f"{name}.weight", (self.hidden,), (None,))
        table.append(Parameter(NORM, (self.hidden,), (None,)))
        if self.scalar_head:
            table.append(Parameter(VALUE_WEIGHT, (1, self.hidden), (None, "fsdp")))
            table.append(Parameter(VALUE_BIAS, (1,), (None,)))
        elif not self.tied:
            table.append(Parameter(HEAD, (self.vocab, self.hidden), ("tensor", "fsdp")))
        return tuple(table)


def read_config(path: Path) -> DecoderConfig:
    """Return the decoder that a directory's config.json describes. Raises ModelError if damaged or unsupported."""
    try:
        table = json_object(path / "config.json")
        text_config(path)
        return _parsed(table, where=path / "config.json")
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} is incomplete or damaged: {error}; copy it again") from error


def _parsed(table: Mapping[str, Any], *, where: Path) -> DecoderConfig:
    model_type = table.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{where}: the architecture {model_type!r} is not supported by the JAX decoder; it supports {known}"
        )
    _refuse_unsupported(table, where)
    always_bias, qk_norm = FAMILIES[model_type]
    heads, hidden = int(table["num_attention_heads"]), int(table["hidden_size"])
    attention_bias = bool(table.get("attention_bias", False)) if always_bias is None else False
    slides = _slides(table)
    is_gemma = model_type == _GEMMA
    scalar = table.get("query_pre_attn_scalar", 256) if is_gemma else None
    whole, local = (_rotary(table, where, kind) for kind in ("full_attention", "sliding_attention"))
    return DecoderConfig(
        model_type=model_type,
        vocab=int(table["vocab_size"]),
        hidden=hidden,
        intermediate=int(table["intermediate_size"]),
        layers=int(table["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(table.get("num_key_value_heads") or heads),
        head_dim=int(table.get("head_dim") or _HEAD_DIMS.get(model_type) or hidden // heads),
        norm_eps=float(table.get("rms_norm_eps", 1e-6)),
        rotary=whole,
        tied=bool(table.get("tie_word_embeddings", is_gemma)),
        qkv_bias=attention_bias or bool(always_bias),
        output_bias=attention_bias,
        mlp_bias=bool(table.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=qk_norm,
        dtype=str(model_dtype(where.parent)),
        window=int(table["sliding_window"]) if any(slides) else None,
        slides=slides if any(slides) else (),
        local_rotary=local if any(slides) and local != whole else None,
        query_scale=None if scalar is None else float(scalar) ** -0.5,
    )


def _slides(table: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it attends within a sliding window only."""
    layers, window, kind = int(table["num_hidden_layers"]), table.get("sliding_window"), table["model_type"]
    if kind in ("qwen2", "qwen3") and not table.get("use_sliding_window", False):
        window = None  # these configurations have a separate switch
    if window is None or kind in ("llama", "olmo2"):
        return (False,) * layers
    if (kinds := table.get("layer_types")) is not None:
        return tuple(each == "sliding_attention" for each in kinds)
    if kind in _PATTERNS:
        every = int(table.get("sliding_window_pattern") or _PATTERNS[kind])
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    return tuple(layer >= int(table.get("max_window_layers", 0)) for layer in range(layers))


def _refuse_unsupported(table: Mapping[str, Any], where: Path) -> None:
    activation, expected = table.get("hidden_activation") or table.get("hidden_act"), "silu"
    expected = _ACTIVATIONS.get(str(table["model_type"]), expected)
    kinds = {*(table.get("layer_types") or ())} - {"full_attention", "sliding_attention"}
    findings = {
        f"layers of type {', '.join(sorted(kinds))}": bool(kinds),
        "attention in both directions": bool(table.get("use_bidirectional_attention")),
        "capped scores or logits": bool(table.get("attn_logit_softcapping") or table.get("final_logit_softcapping")),
        "quantised weights": table.get("quantization_config") is not None,
        "rotary embeddings of a part of each head": float(_rope_table(table).get("partial_rotary_factor", 1.0)) != 1.0,
        f"the activation {activation!r}": (activation or expected) != expected,
    }
    for what, found in findings.items():
        if found:
            raise ModelError(f"{where} asks for {what}, which the JAX decoder does not support; choose another model")


def _rope_table(table: Mapping[str, Any], kind: str = "full_attention") -> Mapping[str, Any]:
    """Return the rotary settings of layers of a kind, from `rope_parameters` or from the settings before it."""
    rope = table.get("rope_parameters") or {}
    if kind in rope:
        rope = rope[kind] or {}
    elif (not rope and kind == "full_attention") or table.get("model_type") not in _PATTERNS:
        rope = rope or table.get("rope_scaling") or {}
    theta = table.get("rope_theta", 1_000_000.0 if table.get("model_type") == _GEMMA else None)
    if kind == "sliding_attention" and table.get("model_type") == _GEMMA:
        theta = table.get("rope_local_base_freq", 10_000.0)
    given = {"rope_theta": theta, "partial_rotary_factor": table.get("partial_rotary_factor")}
    return {name: value for name, value in given.items() if value} | dict(rope)


def _rotary(table: Mapping[str, Any], where: Path, kind_of_layer: str) -> Rotary:
    rope = _rope_table(table, kind_of_layer)
    kind, theta = rope.get("rope_type") or rope.get("type") or "default", float(rope.get("rope_theta", 10_000.0))
    if kind == "default":
        return Rotary(theta=theta)
    if kind == "linear":
        return Rotary(theta=theta, factor=float(rope["factor"]))
    if kind == "llama3":
        return Rotary(
            theta=theta,
            factor=float(rope["factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    if kind == "yarn" and not rope.get("mscale_all_dim") and rope.get("truncate", True):
        factor, scale = float(rope["factor"]), rope.get("attention_factor")
        return Rotary(
            theta=theta,
            factor=factor,
            original_positions=int(rope.get("original_max_position_embeddings") or table["max_position_embeddings"]),
            betas=(float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)),
            scale=float(scale) if scale is not None else 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0,
        )
    raise ModelError(
        f"{where} asks for the rotary scaling {kind!r}, which the JAX decoder does not support; it supports "
        "default, linear, llama3 and yarn"
    )
