"""Values that cross the trainer contract: frozen, numpy only.

Letters in shapes: T tokens of a micro-batch, S segments packed into it: a rollout, or a part of a branching one, each.
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
#: Numbers of experts, one byte each where a layer has at most 256, else two.
Experts = NDArray[np.unsignedinteger[Any]]


class Precision(StrEnum):
    """Arithmetic of forward and backward; master weights and optimizer state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Head(StrEnum):
    """What the model predicts of each token from the tokens before it."""

    POLICY = "policy"
    """Its log-prob: a language model."""
    VALUE = "value"
    """The return to be expected from there on: the same architecture with a scalar in place of the output layer."""


class HeadMeasure(StrEnum):
    """What a policy head can tell of the whole distribution π(·|s_t) that token t was chosen from, at its temperature.

    An objective that names one in `needs` finds it among its columns, f32 [T], differentiable as the log-probs are. It
    costs no pass: the logits are there. A trainer that cannot measure it refuses the objective with SpecError.
    """

    MEAN_LOGPROB = "vocab_mean_logprobs"
    """(1/V) Σ_a log π(a|s_t)."""
    ENTROPY = "vocab_entropies"
    """−Σ_a π(a|s_t) log π(a|s_t)."""


class HeadPrecision(StrEnum):
    """Arithmetic of the output layer, which engine and trainer share."""

    MODEL = "model"
    """That of the rest of the model."""
    FP32 = "fp32"
    """At least fp32 products and sums, of hidden states and weights as they are."""


class Device(StrEnum):
    """Where a trainer or an engine runs; one that cannot run there refuses it."""

    AUTO = "auto"
    """What its array library prefers: an accelerator where there is one, else the CPU."""
    CPU = "cpu"
    CUDA = "cuda"
    TPU = "tpu"
    """Known to JAX alone."""


class WeightDType(StrEnum):
    """Names the type that weights have in a model directory, on their way to engines, or in an engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Rounding(StrEnum):
    """How fp32 weights become bfloat16 on their way to engines."""

    NEAREST = "nearest"
    """To the nearest. An update smaller than half the spacing changes nothing."""
    DITHERED = "dithered"
    """Up or down by a fixed threshold of each weight, so that the mean over the weights is exact."""


class RoutingShape(NamedTuple):
    """Of a mixture-of-experts model: its layers with a router, the experts of each, and how many compute a token."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest that holds the number of each expert."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Of the numbers of the experts that computed one token."""
        return self.layers * self.top_k * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW (decoupled weight decay) and the global gradient-norm clip; `grad_clip` 0 leaves gradients as they are."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What `init_worker` needs. `model_path` is a local Hugging Face directory (or a bigram model's).

    With `Head.VALUE` it may be that of a language model: values then begin at 0 for every state.
    """

    model_path: Path
    head: Head = Head.POLICY
    seed: int = 0
    precision: Precision = Precision.FP32
    head_precision: HeadPrecision = HeadPrecision.MODEL
    device: Device = Device.AUTO
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gradient_checkpointing: bool = False
    gather_dtype: WeightDType | None = None
    """Of what `gather_weights` yields, and so of what engines are sent; None takes the model directory's."""
    rounding: Rounding = Rounding.NEAREST
    """How `gather_weights` rounds to bfloat16. A backend that cannot dither rounds to the nearest."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of one backend alone, such as its mesh; one that a backend does not know it refuses, never ignores."""
    restore_from: Path | None = None
    memory_share: float | None = None
    """Most of each GPU's memory that the process takes, in (0, 1]; None sets no bound. On a CPU it takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rollouts packed back to back, without padding: the tokens of one forward and backward.

    Most rollouts are one segment. An episode that branched has several, and tokens that more than one of them begins
    with are in the loss mask of the first alone.

    Column t speaks of token t. `logprobs[t]` predicts `token_ids[t]` from the earlier tokens of its own segment, so
    the first token of a segment has no prediction: its log-prob is 0 by definition and `loss_mask` is False there.
    `values[t]` is of the state in which token t was chosen, so it is predicted from the same earlier tokens.

    Example, two rollouts "ab→c" and "d→ef" (→ divides prompt and sample):
        token_ids    a b c d e f
        position_ids 0 1 2 0 1 2
        segment_ids  0 0 0 1 1 1
        loss_mask    0 0 1 0 1 1

    Attributes:
        token_ids: i32 [T].
        position_ids: i32 [T], restart at 0 in each segment.
        segment_ids: i32 [T], 0..S-1, not decreasing; attention never crosses a boundary.
        rollout_ids: i32 [T] or None, the rollout of each segment, in 0..S-1: segments with one number are parts of one
            rollout. Objectives with a term of whole rollouts read it; None says that each segment is a rollout.
        loss_mask: bool [T], the tokens that the model sampled and that may train.
        advantages: f32 [T], computed on whole groups before packing; 0 outside the mask.
        weights: f32 [T], the aggregation weight of each token, computed on the whole batch; 0 outside the mask.
        behavior_logprobs: f32 [T], the sampler's; 0 outside the mask.
        temperatures: f32 [T], of sampling; log-probs are those of softmax(logits / temperature).
        old_logprobs: f32 [T] or None, recomputed by the trainer; 0 or anything outside the mask.
        ref_logprobs: f32 [T] or None, of the frozen reference.
        values: f32 [T] or None, of a critic when the step began; 0 at segment starts.
        returns: f32 [T] or None, what a critic is to predict; 0 outside the mask.
        kl_coefficients: f32 [T] or None, factors of the KL penalty's coefficient where it moves from step to step; a
            column, so that what a backend has compiled for the objective holds for each of its values.
        behavior_versions: i32 [T] or None, of the weights that sampled each token; 0 outside the mask. No trainer
            reads them: they tell staleness from numerics.
        routed_experts: u8 or u16 [T, layers, top_k] or None: the experts that the sampler's routers chose for the token
            before each, when it was chosen; meaningless at segment starts. The trainer's routers then choose the same
            (rollout routing replay, R3: arXiv 2510.11370); None lets them choose.
        num_segments: S.
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
    behavior_versions: Int32 | None = None
    routed_experts: Experts | None = None
    rollout_ids: Int32 | None = None
    num_segments: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])


#: Columns by name, as arrays of the backend's own kind (numpy, torch, jax): what an objective reads.
Columns = Mapping[str, Any]


class Objective(Protocol):
    """What `backward` minimises; written once for every array library.

    Predictions are log-probs, or values when the trainer has a value head.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns it cannot do without: any of `old_logprobs`, `ref_logprobs`, `values`, `returns`, which
        come with the micro-batch, and of `HeadMeasure`, which the trainer adds."""
        ...

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        """Scalar loss to minimise (−J) of [T] predictions, differentiable where the array library differentiates."""
        ...

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        """Closed form of d loss / d predictions, [T]: for backends without automatic differentiation, and for tests."""
        ...


@runtime_checkable
class MeasuringObjective(Protocol):
    """What an `Objective` that may need a `HeadMeasure` has besides."""

    def measure_gradients(self, predictions: Any, columns: Columns, /) -> Mapping[HeadMeasure, Any]:
        """Closed form of d loss / d measure, [T], of each measure in `needs`; beside `prediction_gradient`."""
        ...


def measures_of(objective: Objective) -> tuple[HeadMeasure, ...]:
    """The measures that an objective needs, in the order of `HeadMeasure`."""
    return tuple(measure for measure in HeadMeasure if measure in objective.needs)


#: All parameters in host memory, by name: of each the bytes u8 [n], in the dtype of `weight_layout` and in C order.
HostWeights = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class LossStats:
    """What one `backward` gave: the loss it added, and the predictions f32 [T] of it, 0 outside the loss mask.

    What else there is to know of a step is a function of these predictions and the micro-batch.
    """

    loss: float
    predictions: Float32


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one `optimizer_step` gave: the gradient's global norm before clipping, and the new version."""

    model_version: int
    grad_norm: float
    learning_rate: float
    sent_share: float | None = None
    """What part of the update the rounded weights show, about 1 when rounding is fair; None if nothing is rounded."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Name (Hugging Face's), shape and dtype (`float32`, `bfloat16`, …) of a parameter as it is gathered."""

    name: str
    shape: tuple[int, ...]
    dtype: str
