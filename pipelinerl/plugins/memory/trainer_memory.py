"""Peak device memory of the torch trainer, in closed form from sizes alone.

The peak is in a backward pass after the first backward pass of a step: the device then holds all gradients and
everything that the forward pass kept. Per token, a layer keeps the following numbers of values. H is the hidden size;
Q, K and I are the widths of the queries, the keys and the MLP:

    in fp32    residual stream 2 H, norms' outputs 2 H, queries Q, keys and values 2 K, attention's output 2 Q, the MLP
               4 I (5 I if it is not gated). If the weights of RMS norms are trained, the norms keep another 2 H, and
               norms of queries and keys another 2 (Q + K).
    in bf16    the same, but the residual stream and the norms' inputs stay in fp32; each linear layer keeps its input
               once more, and a bf16 copy of its weight until its backward pass

If engines round weights, forward and backward passes compute with a rounded copy of the weights: those of linear
layers in bf16, which then need no casts, and the others in fp32.

With the optimizer's state on the host, host memory holds the moments. If passes compute in bf16, host memory also holds
the fp32 masters of linear layers; the device holds only these layers' bf16 weights, which passes use without a copy.

Padding sequences to buckets adds a tenth to what attention keeps. With gradient checkpointing, a layer keeps only its
input, and only one layer at a time keeps everything. In its backward pass, the output layer holds three times its
logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipelinerl.models.model_shape import BYTES, ModelShape
from pipelinerl.trainers.torch.mesh import GradientSum
from pipelinerl.trainers.torch.options import MomentDType, StatePlace
from trainer_contract.types import Precision, WeightDType

#: Number of logits in one piece of the computation, by device: copied from `numerics.torch_logprobs`, since importing
#: that module would load torch.
LOGITS_AT_ONCE: Final = {"cpu": 2**24, "cuda": 2**27}
#: Factor by which padding sequences to buckets of similar lengths increases what attention keeps.
_PADDING: Final = 1.1
#: Number of arrays of the logits' size in memory: log-softmax, its gradient, and the gradient of the logits.
_LOGITS_HELD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one process of a torch trainer that shards the model over `shards` processes.

    A micro-batch has `tokens` tokens, of which `trained` have a loss. Context parallelism divides it over `cp`
    processes. `rank` is the rank of LoRA adapters on `targets` (None: all linear layers); 0 means training all weights
    without LoRA. `values` is True if a critic of the model's size is loaded as well; `references` counts frozen models.

    `moments` is the dtype of the optimizer's moments. `place` says if the optimizer's state is on the device or the
    host. `on_gpu` matters because a GPU computes more logits at once than a CPU.
    """

    shape: ModelShape
    precision: Precision
    tokens: int
    trained: int
    checkpointing: bool = False
    rank: int = 0
    targets: tuple[str, ...] | None = None
    shards: int = 1
    cp: int = 1
    wire: WeightDType = WeightDType.FLOAT32
    values: bool = False
    references: int = 0
    moments: MomentDType = MomentDType.FP32
    place: StatePlace = StatePlace.DEVICE
    gradients: GradientSum = GradientSum.WHOLE
    on_gpu: bool = False

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes on the device at the peak, by purpose."""
        values = 2 if self.values else 1
        bases = 1 if self.rank and self.shards == 1 else values + self.references
        sizes = {
            "weights": self._weights * bases + 4 * self.adapters * values // self.shards,
            "gradients": self._gradients * values,
            "moments": 0 if self._is_on_host else self._moments * values,
            "activations": self._activations,
            "logits": self._logits,
            "casts": self._casts,
            "served": self._served,
            "gather": self._gather,
        }
        return {name: size for name, size in sizes.items() if size}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        return self.total

    @property
    def host(self) -> int:
        """Bytes of this process's optimizer state on the host."""
        if not self._is_on_host:
            return 0
        return (self._moments + 4 * self._rounded) * (2 if self.values else 1)

    @property
    def adapters(self) -> int:
        """Number of adapter parameters (A and B) over all targets; 0 without adapters."""
        return self.rank * sum(map(sum, self.shape.adapted(self.targets))) if self.rank else 0

    @property
    def _trained(self) -> int:
        return self.adapters if self.rank else self.shape.count

    @property
    def _is_on_host(self) -> bool:
        return self.place is StatePlace.HOST

    @property
    def _moments(self) -> int:
        return (8 if self.moments is MomentDType.FP32 else 4) * self._trained // self.shards

    @property
    def _rounded(self) -> int:
        """Number of parameters that the device holds only in bf16, because their fp32 masters are on the host."""
        is_apart = self._is_on_host and self._is_half and not self.rank and self.shards == 1
        return self.shape.products if is_apart else 0

    @property
    def _own_tokens(self) -> int:
        return -(-self.tokens // self.cp)

    @property
    def _own_trained(self) -> int:
        return -(-self.trained // self.cp)

    @property
    def _is_half(self) -> bool:
        return self.precision is Precision.BF16

    @property
    def _keeps_base_in_bf16(self) -> bool:
        return bool(self.rank) and self._is_half and self.shape.dtype is WeightDType.BFLOAT16

    @property
    def _weights(self) -> int:
        """Bytes of the weights. On a mesh: one shard, two gathered layers, and the parameters outside of layers."""
        shape, matrix = self.shape, 2 if self._keeps_base_in_bf16 else 4
        whole = 4 * shape.count - (4 - matrix) * shape.matrices - 2 * self._rounded
        if self.shards == 1:
            return whole
        return whole // self.shards + matrix * (2 * self._layer + self._outer)

    @property
    def _layer(self) -> int:
        """Number of parameters in a layer's matrices and experts."""
        return (sum(map(math.prod, self.shape.linear.values())) + self.shape.experts) // self.shape.layers

    @property
    def _outer(self) -> int:
        """Number of parameters that are in no layer's matrices: embeddings, an output layer, and all norms."""
        return self.shape.count - self._layer * self.shape.layers

    @property
    def _gradients(self) -> int:
        """Bytes of gradients: of all trained parameters or, if gradients are sharded, of this process's shard.

        Shards need further memory for gradients being reduced over the mesh: one layer's, and those outside of layers.
        """
        if self.shards == 1 or self.gradients is GradientSum.WHOLE:
            return 4 * self._trained
        passing = 2 * (self._layer + self._outer) if not self.rank else 0
        return 4 * (self._trained // self.shards + passing)

    @property
    def _casts(self) -> int:
        """Bytes of the bf16 copies that autocast makes of fp32 weights; with checkpointing, of one layer at a time."""
        if not self._is_half or self._keeps_base_in_bf16:
            return 0
        in_bf16 = max(self._rounded, self._narrow)
        if self.checkpointing:
            return 2 * max(0, self.shape.vocab * self.shape.hidden + self._layer - in_bf16)
        return 2 * (self.shape.multiplied - in_bf16)

    @property
    def _narrow(self) -> int:
        """Number of parameters that passes read, without a cast, from the bf16 copy, which is rounded as in engines."""
        is_whole = self._is_half and not self.rank and self.shards == 1
        return self.shape.products if is_whole and self.wire is WeightDType.BFLOAT16 else 0

    @property
    def _served(self) -> int:
        """Bytes of weight copies besides `_weights`, which exist if passes compute with weights rounded as engines do.

        On a mesh, the rounded weights replace the shards during passes; the copy then keeps the unrounded weights.
        """
        if self.rank or self.wire is WeightDType.FLOAT32:
            return 0
        count = self.shape.count
        if self.shards > 1:
            return 4 * count // self.shards
        return BYTES[self.wire] * (count - self._rounded) + 4 * (count - self._narrow)

    @property
    def _activations(self) -> int:
        shape, tokens = self.shape, self._own_tokens
        outer = 4 * tokens * shape.hidden * (2 if self.rank else 3) + 4 * self._own_trained * shape.hidden
        if not self.checkpointing:
            return outer + tokens * shape.layers * self._of_layer
        return outer + 4 * tokens * shape.hidden * shape.layers

    @property
    def _of_layer(self) -> int:
        """Bytes that one layer keeps for each token."""
        shape, frozen = self.shape, bool(self.rank)
        hidden, mlp = shape.hidden, shape.intermediate * (4 if shape.is_gated else 5)
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = _PADDING * (2 * query + 2 * key) + query
        full, products = 2.0 * hidden, 2.0 * hidden + attention + mlp
        if shape.is_gated and not frozen:
            full += 2 * hidden
        if shape.normalises_heads:
            full += (1 if frozen else 2) * (query + key)
        if self._is_half:
            inputs = (1 if shape.has_merged_attention else 3) + (2 if shape.is_gated else 1)
            products += (inputs - 2) * hidden + (query if frozen else 0)
            return int(4 * full + 2 * products)
        return int(4 * (full + products))

    @property
    def _logits(self) -> int:
        """Bytes for temporary arrays: the larger of the output layer's and those of a decoder layer in backward."""
        shape, tokens = self.shape, self._own_tokens
        whole = self._own_trained * shape.vocab
        most = LOGITS_AT_ONCE["cuda" if self.on_gpu else "cpu"]
        at_once, weight = min(whole, most), 0 if self.rank else 4 * shape.vocab * shape.hidden
        head = max(_LOGITS_HELD * 4 * at_once, 4 * at_once + 2 * weight)
        if whole > most:
            # The output layer computes in pieces and sums its weight's gradient in fp32; with bf16 weights, the
            # gradient needs twice this memory.
            head = _LOGITS_HELD * 4 * at_once + (2 if self._is_half else 1) * weight
        size = 2 if self._is_half else 4
        back = size * tokens * (2 * shape.intermediate + 2 * shape.hidden)
        if self.checkpointing:
            back += tokens * self._of_layer
        return max(head, back)

    @property
    def _gather(self) -> int:
        """Bytes for gathering the largest parameter as it is sent; adapters are first merged into it in fp32."""
        largest = self.shape.largest
        if self.rank:
            merged = max((rows * columns for rows, columns in self.shape.adapted(self.targets)), default=0)
            return max(8 * merged, BYTES[self.wire] * largest)
        return 0 if self.wire is WeightDType.FLOAT32 and self.shards == 1 else BYTES[self.wire] * largest
