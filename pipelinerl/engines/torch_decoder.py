"""A straight-line forward of the Llama family (Llama, Qwen2, Qwen3) over the model's own parameters.

transformers' modules spend more time in Python than in arithmetic when a step has few rows. This forward calls the same
operations in a row, without modules, on tokens that are flat from one end to the other. It reads the parameters where
they are, so a swap of weights reaches it as it reaches the modules; tests hold both to the same log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pipelinerl.engines.torch_attention import attend_decode, attend_prefill
from pipelinerl.engines.torch_cache import DecodePlan, PrefillPlan, RowCache

_FAMILY: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
#: Rotary embeddings that are a function of the position alone, so that a table can hold them.
_STATIC_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})


class _Linear(NamedTuple):
    """Weight [out, in] and bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's parameters: the objects themselves, whose data a swap re-points."""

    input_norm: Tensor
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: _Linear
    post_norm: Tensor
    gate: _Linear
    up: _Linear
    down: _Linear
    scale: float
    window: int | None


@final
class LlamaForward:
    """The forward of one model. Only for models that `fits` accepts."""

    def __init__(self, model: Any, *, context_length: int) -> None:
        config, backbone = model.config, model.model
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = backbone.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._embedding: Tensor = backbone.embed_tokens.weight
        self._layers = [_layer(layer) for layer in backbone.layers]
        self._norm: Tensor = backbone.norm.weight
        self._head = _linear(model.lm_head)
        positions = torch.arange(context_length, device=self._embedding.device)[None]
        cos, sin = backbone.rotary_emb(self._embedding[:1], positions)
        half = self._head_dim // 2
        # rotate_half(x) · sin = roll(x, D/2) · (−sin, sin): the sign lives in the table.
        self._cos: Tensor = cos[0]
        self._sin: Tensor = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    @staticmethod
    def fits(model: Any) -> bool:
        """Is `model` of the family, with nothing in it that this forward does not compute?"""
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return False
        rope = getattr(model.config, "rope_parameters", None) or {}
        return rope.get("rope_type", "default") in _STATIC_ROPE

    def fill(self, token_ids: Tensor, positions: Tensor, cache: RowCache, plan: PrefillPlan) -> None:
        """Store keys and values of prompts [P, T] as planned."""
        self._hidden(token_ids, positions, cache, plan)

    def logits(self, token_ids: Tensor, positions: Tensor, cache: RowCache, plan: DecodePlan) -> Tensor:
        """Logits [B, V] after one token for each row [B, 1]."""
        x = self._hidden(token_ids, positions, cache, plan)
        return linear(rms_norm(x, (x.shape[1],), self._norm, self._eps), *self._head)

    def _hidden(self, token_ids: Tensor, positions: Tensor, cache: RowCache, plan: PrefillPlan | DecodePlan) -> Tensor:
        batch, length = token_ids.shape
        flat = positions.reshape(-1)
        cos, sin = self._cos[flat][:, None], self._sin[flat][:, None]  # [B · T, 1, D]
        x = embedding(token_ids.reshape(-1), self._embedding)
        dims = (x.shape[1],)
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, dims, layer.input_norm, self._eps)
            query = self._rotated(linear(h, *layer.query), self._heads, layer.query_norm, cos, sin)
            key = self._rotated(linear(h, *layer.key), self._kv_heads, layer.key_norm, cos, sin)
            value = linear(h, *layer.value).view(batch, length, self._kv_heads, self._head_dim)
            keys, values = cache.update(
                key.view(batch, length, self._kv_heads, self._head_dim).transpose(1, 2), value.transpose(1, 2), index
            )
            query = query.view(batch, length, self._heads, self._head_dim).transpose(1, 2)
            if isinstance(plan, DecodePlan):
                attended = attend_decode(query, keys, values, plan, layer.window, layer.scale)
            else:
                attended = attend_prefill(query, keys, values, layer.window, layer.scale)
            x = x + linear(attended.reshape(batch * length, -1), *layer.output)
            h = rms_norm(x, dims, layer.post_norm, self._eps)
            x = x + linear(silu(linear(h, *layer.gate)).mul_(linear(h, *layer.up)), *layer.down)
        return x

    def _rotated(self, x: Tensor, heads: int, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.view(-1, heads, self._head_dim)
        if norm is not None:
            x = rms_norm(x, (self._head_dim,), norm, self._eps)
        return torch.addcmul(x * cos, x.roll(self._head_dim // 2, dims=-1), sin)


def _linear(module: nn.Linear) -> _Linear:
    return _Linear(module.weight, module.bias)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=None if norms[0] is None else norms[0].weight,
        key_norm=None if norms[1] is None else norms[1].weight,
        output=_linear(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        scale=attention.scaling,
        window=getattr(attention, "sliding_window", None),
    )
