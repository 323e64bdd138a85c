"""The data types of the trainer contract: immutable, and based on numpy only.

In shapes, T is the number of tokens of a micro-batch, and S its number of segments. A segment is a rollout, or a path
through one that branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
#: Arrays of expert indices: u8 if a layer has at most 256 experts, else u16.
Experts = NDArray[np.unsignedinteger[Any]]


class Precision(StrEnum):
    """Precision of computation in forward and backward; master weights are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Head(StrEnum):
    """The quantity that the model predicts for each token from the tokens before it."""

    POLICY = "policy"
    """The token's log-prob: a language model."""
    VALUE = "value"
    """The expected return from the state before the token: the same architecture with a scalar output layer."""


class HeadMeasure(StrEnum):
    """A statistic of the whole distribution π(·|s_t) that token t was sampled from, at its temperature.

    An objective that lists a measure in `needs` receives it as a differentiable column, f32 [T], computed from the
    logits of the same pass. A trainer that cannot compute it rejects the objective with SpecError.
    """

    MEAN_LOGPROB = "vocab_mean_logprobs"
    """The mean log-prob over the vocabulary, (1/V) Σ_a log π(a|s_t)."""
    ENTROPY = "vocab_entropies"
    """The entropy, −Σ_a π(a|s_t) log π(a|s_t)."""


class HeadPrecision(StrEnum):
    """Precision of arithmetic in the output layer; engine and trainer use the same."""

    MODEL = "model"
    """The precision of the rest of the model."""
    FP32 = "fp32"
    """Products and sums in at least fp32, with hidden states and weights as they are."""


class Kernels(StrEnum):
    """Kernels in forward passes: fast, or independent of the batch; engine and trainer use the same kind."""

    FAST = "fast"
    """The fastest ones. A token's last bits depend on the tokens that are computed with it."""
    BATCH_INVARIANT = "batch_invariant"
    """A token has the same bits in every batch, so that log-probs of engine and trainer are equal."""


class Device(StrEnum):
    """The device of a trainer or an engine; a backend rejects a device that it does not support."""

    AUTO = "auto"
    """The array library's choice: an accelerator if available, else the CPU."""
    CPU = "cpu"
    CUDA = "cuda"
    TPU = "tpu"
    """Supported only by JAX."""


class WeightDType(StrEnum):
    """Dtype of weights: in a model directory, while they are sent to engines, or in an engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Rounding(StrEnum):
    """Rounding of fp32 weights to bfloat16 for engines."""

    NEAREST = "nearest"
    """Round to nearest. An update smaller than half the spacing of bfloat16 values changes nothing."""
    DITHERED = "dithered"
    """Round up or down by a fixed threshold per weight, so that rounding errors average out over the weights."""


class RoutingShape(NamedTuple):
    """Sizes of a mixture-of-experts model: number of layers with a router, experts per layer, experts per token."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that holds every expert index."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.top_k * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW (decoupled weight decay) and clipping of the global gradient norm; `grad_clip` 0 disables clipping."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Arguments of `init_worker`. `model_path` is a local Hugging Face directory (or a bigram model's).

    With `Head.VALUE` the directory may hold a language model without a value head; the head then starts at 0.
    """

    model_path: Path
    head: Head = Head.POLICY
    seed: int = 0
    precision: Precision = Precision.FP32
    head_precision: HeadPrecision = HeadPrecision.MODEL
    kernels: Kernels = Kernels.FAST
    device: Device = Device.AUTO
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gradient_checkpointing: bool = False
    gather_dtype: WeightDType | None = None
    """Dtype of `gather_weights`, and so of the weights sent to engines; None uses the model directory's."""
    rounding: Rounding = Rounding.NEAREST
    """Rounding of `gather_weights` to bfloat16. A backend that cannot dither rounds to nearest."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of one backend, such as its mesh. A backend rejects unknown options and never ignores them."""
    restore_from: Path | None = None
    memory_share: float | None = None
    """Upper bound of the process's share of each GPU's memory, in (0, 1]; None sets no bound. No effect on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rollouts packed back to back, without padding: the tokens of one forward and backward pass.

    Most rollouts are one segment. An episode that branched has several. If segments share a prefix, its sampled tokens
    are in the loss mask of the first of these segments only.

    Column t describes token t. A log-prob at t is that of `token_ids[t]` given the earlier tokens of its segment. The
    first token of a segment has no prediction: its log-prob is 0 by definition and `loss_mask` is False. `values[t]` is
    the value of the state in which token t was sampled, predicted from the same earlier tokens.

    Example, two rollouts "ab→c" and "d→ef" (→ divides prompt and sample):
        token_ids    a b c d e f
        position_ids 0 1 2 0 1 2
        segment_ids  0 0 0 1 1 1
        loss_mask    0 0 1 0 1 1

    Attributes:
        token_ids: i32 [T].
        position_ids: i32 [T], restart at 0 in each segment.
        segment_ids: i32 [T], 0..S-1, not decreasing; attention never crosses a boundary.
        rollout_ids: i32 [T] or None, the number of each token's rollout, in 0..S-1, for objectives that compute a
            quantity per rollout. None: each segment is a rollout.
        loss_mask: bool [T], True for tokens that the model sampled and that may be trained on.
        advantages: f32 [T], computed on whole groups before packing; 0 outside the mask.
        weights: f32 [T], the aggregation weight of each token, computed on the whole batch; 0 outside the mask.
        behavior_logprobs: f32 [T], log-probs that the sampler reported; 0 outside the mask.
        temperatures: f32 [T], sampling temperatures; log-probs are those of softmax(logits / temperature).
        old_logprobs: f32 [T] or None, log-probs recomputed by the trainer; any value outside the mask.
        ref_logprobs: f32 [T] or None, log-probs of the frozen reference.
        values: f32 [T] or None, predicted by the critic when the step began; 0 at segment starts.
        returns: f32 [T] or None, targets of the critic; 0 outside the mask.
        kl_coefficients: f32 [T] or None, factors by which the KL penalty's coefficient is multiplied. They may vary
            between steps: a column, unlike a changed constant, does not make backends recompile the objective.
        streams: i32 [T] or None, for an objective that sums several losses (`pipelinerl.objective.streams`): the number
            of the loss to which each token belongs. None if all tokens have the same loss.
        behavior_versions: i32 [T] or None, version of the weights that sampled each token; 0 outside the mask. Trainers
            ignore them; metrics use them to separate staleness from numerical mismatch.
        routed_experts: u8 or u16 [T, layers, top_k] or None. Row t holds the experts that the sampler's routers chose
            for token t − 1; meaningless at segment starts. The trainer's routers then choose the same experts (rollout
            routing replay, R3: arXiv 2510.11370); with None they choose freely.
        num_segments: S, the number of segments.
    """

    token_ids: Int32
    position_ids: Int32
    segment_ids: Int32
    loss_mask: Bool
    advantages: Float32
    weights: Float32
    behavior_logprobs: Float32
    temperatures: Float32
    old_logprobs: Float32 | None = None
    ref_logprobs: Float32 | None = None
    values: Float32 | None = None
    returns: Float32 | None = None
    kl_coefficients: Float32 | None = None
    streams: Int32 | None = None
    behavior_versions: Int32 | None = None
    routed_experts: Experts | None = None
    rollout_ids: Int32 | None = None
    num_segments: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


#: The inputs of an objective: columns by name, as arrays of the backend's library (numpy, torch, jax).
Columns = Mapping[str, Any]


class Objective(Protocol):
    """The loss that `backward` differentiates, in any array library; predictions are log-probs or values."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the optional columns that the objective reads, of `MicroBatch` and of `HeadMeasure`."""
        ...

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        """Return the scalar loss (−J) for predictions [T], differentiable if the array library supports it."""
        ...

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        """Return d loss / d predictions, [T], in closed form, for backends without automatic gradients."""
        ...


@runtime_checkable
class MeasuringObjective(Protocol):
    """Additional interface of an `Objective` whose `needs` may contain a `HeadMeasure`."""

    def measure_gradients(self, predictions: Any, columns: Columns, /) -> Mapping[HeadMeasure, Any]:
        """Return d loss / d measure, [T], in closed form, for each measure in `needs`."""
        ...


def measures_of(objective: Objective) -> tuple[HeadMeasure, ...]:
    """Return the measures that an objective needs, in the order of `HeadMeasure`."""
    return tuple(measure for measure in HeadMeasure if measure in objective.needs)


#: All parameters of a model in host memory, by name: raw bytes u8 [n] in C order, of the dtypes in `weight_layout`.
HostWeights = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class LossStats:
    """The result of `backward` for one micro-batch: its loss, and its predictions f32 [T], 0 outside the loss mask."""

    loss: float
    predictions: Float32


@dataclass(frozen=True, slots=True)
class StepStats:
    """The result of one `optimizer_step`: the gradient's global norm before clipping, and the new version."""

    model_version: int
    grad_norm: float
    learning_rate: float
    sent_share: float | None = None
    """The fraction of the update visible in the rounded weights, about 1 if rounding is unbiased; None without
    rounding."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Hugging Face name, shape and dtype (`float32`, `bfloat16`, …) of a gathered parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
