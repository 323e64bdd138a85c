"""A module-free forward of the Llama family (Llama, Qwen2, Qwen3) over the model's own parameters.

With few rows in a step, transformers' modules spend more time in Python than in arithmetic. This forward calls the same
operations directly, and reads the parameters in place, so a swap of weights reaches it too. Tests check that both
forwards give the same log-probs.

In half precision it rounds exactly where a trainer under autocast rounds. Linear layers and attention are in the
model's dtype; the residual stream, norms and rotations are in fp32. transformers' modules in half precision round after
each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pipelinerl.engines.torch.attention import attend_decode, attend_prefill
from pipelinerl.engines.torch.page_cache import CacheReading, DecodePlan, PageCache, PrefillPlan
from pipelinerl.engines.torch.quantized import QuantizedLinear
from pipelinerl.numerics.torch_batch_invariant import InvariantLinear
from pipelinerl.numerics.torch_logprobs import Fp32Head
from trainer_contract.types import Kernels

_FAMILY: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
#: Types of rotary embeddings whose angles depend on the position alone, so that a table can hold their values; those of
#: "dynamic" do within `context_limit`.
_STATIC_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn", "dynamic"})


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


_Product = _Linear | QuantizedLinear | Fp32Head | InvariantLinear  # functions [B, in] → [B, out]


class _Joined:
    """Linear layers without biases and with the same input; one product computes weights that lie back to back."""

    def __init__(self, *parts: _Product) -> None:
        self._parts = parts
        self._sizes: list[int] = []
        self._weight: Tensor | None = None

    def find(self) -> None:
        """Look up the layers' weights again after a swap, which moved them to another buffer; join adjacent weights."""
        self._weight = None
        weights = [part.weight for part in self._parts if isinstance(part, _Linear) and part.bias is None]
        ends = [weight.data_ptr() + weight.nbytes for weight in weights]
        in_one = len({(weight.dtype, weight.untyped_storage().data_ptr()) for weight in weights}) == 1
        are_adjacent = in_one and [weight.data_ptr() for weight in weights[1:]] == ends[:-1]
        if len(weights) == len(self._parts) and are_adjacent:
            self._sizes = [len(weight) for weight in weights]
            joined = weights[0].detach().as_strided((sum(self._sizes), weights[0].shape[1]), weights[0].stride())
            self._weight = nn.Parameter(joined, requires_grad=False)  # torch compiles for a parameter's exact size

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return each layer's result [B, out]."""
        if self._weight is None:
            return [part(x) for part in self._parts]
        return linear(x, self._weight).split(self._sizes, dim=-1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one transformer layer. A swap of weights keeps these objects and changes the data in them."""

    input_norm: Tensor
    queries_keys_values: _Joined
    head_norms: tuple[Tensor, Tensor] | None
    output: _Product
    post_norm: Tensor
    gate_and_up: _Joined
    down: _Product
    scale: float
    window: int | None


class LlamaForward:
    """The module-free forward pass of one model; only for models that `fits` accepts."""

    def __init__(self, model: Any, *, context_length: int, kernels: Kernels = Kernels.FAST) -> None:
        config, backbone = model.config, model.model
        self._is_fast = kernels is Kernels.FAST  # otherwise compute norms and rotations as transformers computes them
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = backbone.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._embedding: Tensor = backbone.embed_tokens.weight
        self._layers = [_layer(layer) for layer in backbone.layers]
        self._norm: Tensor = backbone.norm.weight
        self._head = _linear(model.lm_head)
        positions = torch.arange(context_length, device=self._embedding.device)[None]
        cos, sin = backbone.rotary_emb(self._embedding[:1].float(), positions)
        half = self._head_dim // 2
        # The table includes the sign, because rotate_half(x) · sin = roll(x, D/2) · (−sin, sin).
        self._cos: Tensor = cos[0]
        self._sin: Tensor = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._project, self._multiply, self._finish = self._projected, self._products, self._finished
        self._joins = self._embedding.is_cuda  # a CPU gains nothing from few large products
        self._address = 0

    def compile(self) -> None:
        """Compile all but attention at the first forward, for any number of tokens, with unchanged rounding."""
        settings: Any = {"dynamic": True, "options": {"emulate_precision_casts": True}}
        self._project = torch.compile(self._projected, **settings)
        self._multiply = torch.compile(self._products, **settings)
        self._finish = torch.compile(self._finished, **settings)

    @staticmethod
    def fits(model: Any) -> bool:
        """Return whether `model` belongs to the Llama family and uses only what this forward computes."""
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return False
        rope = getattr(model.config, "rope_parameters", None) or {}
        return rope.get("rope_type", "default") in _STATIC_ROPE

    def fill(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: PrefillPlan) -> None:
        """Compute prompts [P, T] and store their keys and values in `cache` as `plan` says."""
        self._hidden(token_ids, positions, cache, plan)

    def logits(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: DecodePlan) -> Tensor:
        """Feed one token [K, 1] to each of K rows; return the logits [K, V] of the next tokens."""
        x = self._hidden(token_ids, positions, cache, plan)
        hidden = self._rms_norm(x, self._norm.float())
        return self._head(hidden if isinstance(self._head, Fp32Head) else hidden.to(self._norm.dtype))

    def _hidden(self, token_ids: Tensor, positions: Tensor, cache: PageCache, plan: PrefillPlan | DecodePlan) -> Tensor:
        address = self._norm.data_ptr()
        if self._joins and address != self._address:  # after a swap, point the joined layers at their new memory
            self._address = address
            for layer in self._layers:
                layer.queries_keys_values.find()
                layer.gate_and_up.find()
        batch, length = token_ids.shape
        x = embedding(token_ids.reshape(-1), self._embedding).float()
        if isinstance(plan, DecodePlan) and plan.reading is CacheReading.KERNEL and plan.of_row is None:
            return self._in_kernels(x, cache, plan)
        flat = positions.reshape(-1)
        cos, sin = self._cos[flat][:, None], self._sin[flat][:, None]  # shape [B · T, 1, D]
        for index, layer in enumerate(self._layers):
            projected = self._project(x, layer, cos, sin)
            query, key, value = (each.view(batch, length, -1, self._head_dim).transpose(1, 2) for each in projected)
            keys, values = cache.update(key, value, index)
            if isinstance(plan, DecodePlan):
                attended = attend_decode(query, keys, values, plan, layer.window, layer.scale)
            else:
                attended = attend_prefill(query, keys, values, plan.reading, layer.window, layer.scale)
            x = self._finish(x, attended.reshape(batch * length, -1), layer)
        return x

    def _in_kernels(self, x: Tensor, cache: PageCache, plan: DecodePlan) -> Tensor:
        """Return the hidden states [K, d] after a decode step's last layer; Triton kernels write and read the cache."""
        # imported here, because it needs triton, which only CUDA builds of torch include
        from pipelinerl.engines.torch.paged_attention import attend_blocks, rotate_and_store

        for index, layer in enumerate(self._layers):
            keys, values = cache.blocks(index)
            query = rotate_and_store(
                self._multiply(x, layer),
                keys,
                values,
                plan.table,
                plan.positions,
                cos=self._cos,
                sin=self._sin,
                norms=layer.head_norms,
                eps=self._eps,
            )
            attended = attend_blocks(
                query, keys, values, plan.table, plan.positions, window=layer.window, scale=layer.scale
            )
            x = self._finish(x, attended.flatten(1), layer)
        return x

    def _projected(self, x: Tensor, layer: _Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, Hq, D], keys and values [N, H · D] of a layer's input [N, d]."""
        queries, keys, values = self._products(x, layer)
        query_norm, key_norm = layer.head_norms or (None, None)
        query = self._rotated(queries, self._heads, query_norm, cos, sin)
        return query, self._rotated(keys, self._kv_heads, key_norm, cos, sin), values

    def _products(self, x: Tensor, layer: _Layer) -> Sequence[Tensor]:
        """Return queries [N, Hq · D], keys and values [N, H · D], without norms and rotation, of an input [N, d]."""
        return layer.queries_keys_values(self._normed(x, layer.input_norm))

    def _finished(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        """Return a layer's result [N, d] from its input [N, d] and its attention [N, Hq · D]."""
        x = x + layer.output(attended)
        h = self._normed(x, layer.post_norm)
        gate, up = layer.gate_and_up(h)
        return x + layer.down(silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rms_norm(x, weight.float()).to(weight.dtype)

    def _rotated(self, x: Tensor, heads: int, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.view(-1, heads, self._head_dim)
        if norm is not None and dtype is torch.float32:
            x = self._rms_norm(x, norm)
        elif norm is not None:  # Qwen3's own norm rounds before it scales
            x = self._rms_norm(x.float(), None).to(dtype) * norm.float()
        turned = x.roll(self._head_dim // 2, dims=-1)
        rotated = torch.addcmul(x * cos, turned, sin) if self._is_fast else x * cos + turned * sin
        return rotated.to(dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self._is_fast:
            return rms_norm(x, (x.shape[-1],), weight, self._eps)
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps)
        return normed if weight is None else normed * weight


def _linear(module: nn.Linear) -> _Product:
    forward: object = module.forward
    if isinstance(forward, QuantizedLinear | Fp32Head | InvariantLinear):
        return forward
    return _Linear(module.weight, module.bias)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    is_qwen3 = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        queries_keys_values=_Joined(*map(_linear, (attention.q_proj, attention.k_proj, attention.v_proj))),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if is_qwen3 else None,
        output=_linear(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_and_up=_Joined(_linear(mlp.gate_proj), _linear(mlp.up_proj)),
        down=_linear(mlp.down_proj),
        scale=attention.scaling,
        window=getattr(attention, "sliding_window", None),
    )
