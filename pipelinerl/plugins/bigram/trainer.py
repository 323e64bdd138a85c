"""`BigramTrainer`, a trainer in numpy for a bigram model, with closed-form gradients.

The model is one table: logits [V, V], or values [V] with a value head. In tests this trainer replaces real ones, and
serves as an independent reference for their results. Weights and optimizer state are float64; `gather_weights` returns
float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipelinerl.errors import ModelError
from pipelinerl.numerics.logprobs import log_softmax, measure_slopes, measured
from pipelinerl.plugins.bigram.model import PARAMETER, BigramModel
from trainer_contract.batch import check, check_measures
from trainer_contract.errors import NonFiniteError, ProtocolError, SpecError, StateError
from trainer_contract.host_weights import check_weights
from trainer_contract.trainer import started
from trainer_contract.types import (
    Device,
    Float32,
    Head,
    HostWeights,
    LossStats,
    MeasuringObjective,
    MicroBatch,
    Objective,
    OptimizerSpec,
    ParameterInfo,
    Precision,
    StepStats,
    TrainerSpec,
    WeightDType,
    measures_of,
)

Float64 = NDArray[np.float64]

_STATE: Final = "bigram_trainer.safetensors"
_VALUES: Final = "bigram.values"


@dataclass(slots=True)
class BigramWorker:
    """The weights, Adam's two moments and the gradient, each a table [V, V], or [V] with a value head."""

    spec: OptimizerSpec
    head: Head
    table: Float64
    exp_avg: Float64
    exp_avg_sq: Float64
    model_version: int
    gradient: Float64 | None = None


class BigramTrainer:
    """Implementation of `trainer_contract.trainer.Trainer`, whose docstrings describe the methods."""

    def __init__(self) -> None:
        self._state: BigramWorker | None = None

    @property
    def model_version(self) -> int:
        return self._worker.model_version

    @property
    def _worker(self) -> BigramWorker:
        return started(self._state)

    def init_worker(self, spec: TrainerSpec) -> None:
        if spec.device not in (Device.AUTO, Device.CPU) or spec.precision is not Precision.FP32:
            raise SpecError(f"the bigram trainer runs on the CPU in fp32, got {spec.device} in {spec.precision}")
        if spec.gather_dtype not in (None, WeightDType.FLOAT32):
            raise SpecError(f"the bigram trainer gathers float32, got {spec.gather_dtype}; leave out weights.dtype")
        if spec.options:
            raise SpecError(f"the bigram trainer takes no options, got {', '.join(spec.options)}; remove them")
        if spec.memory_share is not None:
            raise SpecError("memory_share limits GPU memory, which the bigram trainer does not use; leave it out")
        try:
            logits = BigramModel.load(spec.model_path).logits.astype(np.float64)
        except ModelError as error:
            raise SpecError(str(error)) from error
        table = logits if spec.head is Head.POLICY else np.zeros(len(logits))
        fresh = BigramWorker(spec.optimizer, spec.head, table, np.zeros_like(table), np.zeros_like(table), 0)
        self._state = fresh if spec.restore_from is None else _restored(fresh, spec.restore_from)

    @property
    def width(self) -> int:
        return 1

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        return [_forward(self._worker, micro_batch) for micro_batch in micro_batches]

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        check_weights(weights, self.weight_layout())
        table = weights[self._name].view(np.float32).reshape(self._worker.table.shape)
        other = replace(self._worker, table=table.astype(np.float64))
        return [_forward(other, micro_batch) for micro_batch in micro_batches]

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        check_measures(objective, self._worker.head)
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=len(self._worker.table), needs=objective.needs)
        return [self._backward(number, each, objective) for number, each in enumerate(micro_batches)]

    def _backward(self, number: int, micro_batch: MicroBatch, objective: Objective) -> LossStats:
        """Accumulate the closed-form gradient of one micro-batch.

        With g = d loss/d predictions, d loss/d logits[p] = Σ_t g_t·(onehot(token_t) − softmax)/temperature_t, summed
        over all tokens t that follow token p. Each measure m, a function of the logits z such as entropy, adds
        Σ_t d loss/d m_t · dm_t/dz_t / temperature_t. With a value head, d loss/d values[p] = Σ_t g_t.
        """
        worker, tokens = self._worker, micro_batch.token_ids
        where = np.flatnonzero(micro_batch.loss_mask)
        predictions, distributions = _predict(worker, micro_batch, where)
        columns = _columns(micro_batch, where)
        if distributions is not None:
            for measure in measures_of(objective):
                columns[str(measure)] = measured(measure, distributions).astype(np.float64, copy=False)
        loss = float(objective.evaluate(predictions, columns))
        if not math.isfinite(loss):
            self.discard_gradient()
            raise NonFiniteError(
                f"the loss is {loss}: look for NaN or infinity in advantages, weights and the sampler's "
                "log-probs; the gradient was cleared",
                number=number,
            )
        if worker.gradient is None:
            worker.gradient = np.zeros_like(worker.table)
        # Ignore an overflow here: `optimizer_step` rejects a gradient that is not finite.
        with np.errstate(invalid="ignore", over="ignore"):
            gradient = objective.prediction_gradient(predictions, columns)
            if distributions is not None:
                temperatures = micro_batch.temperatures[where]
                slope = gradient / temperatures
                gradient = -slope[:, None] * np.exp(distributions)
                gradient[np.arange(len(where)), tokens[where]] += slope
                if isinstance(objective, MeasuringObjective):
                    for measure, outer in objective.measure_gradients(predictions, columns).items():
                        gradient += (outer / temperatures)[:, None] * measure_slopes(measure, distributions)
            np.add.at(worker.gradient, tokens[where - 1], gradient)
        evaluated = np.zeros(micro_batch.num_tokens, dtype=np.float32)
        evaluated[where] = predictions
        return LossStats(loss, evaluated)

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        """Clip the gradient, then take a step of AdamW (Loshchilov and Hutter 2019, Algorithm 2)."""
        worker, spec = self._worker, self._worker.spec
        if worker.gradient is None:
            raise ProtocolError("optimizer_step needs a gradient: call backward first")
        gradient, worker.gradient = worker.gradient, None
        norm = float(np.linalg.norm(gradient))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are unchanged")
        if spec.grad_clip and norm > spec.grad_clip:
            gradient *= spec.grad_clip / norm
        (beta1, beta2), step = spec.betas, worker.model_version + 1
        worker.exp_avg = beta1 * worker.exp_avg + (1 - beta1) * gradient
        worker.exp_avg_sq = beta2 * worker.exp_avg_sq + (1 - beta2) * gradient**2
        mean, square = worker.exp_avg / (1 - beta1**step), worker.exp_avg_sq / (1 - beta2**step)
        decayed = worker.table * (1 - learning_rate * spec.weight_decay)
        worker.table = decayed - learning_rate * mean / (np.sqrt(square) + spec.eps)
        worker.model_version = step
        return StepStats(step, norm, learning_rate)

    def discard_gradient(self) -> None:
        self._worker.gradient = None

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        return (ParameterInfo(self._name, self._worker.table.shape, "float32"),)

    def gather_weights(self) -> Iterator[tuple[str, Float32]]:
        yield self._name, self._worker.table.astype(np.float32)

    def save_state(self, path: Path) -> None:
        worker = self._worker
        tensors = {"table": worker.table, "exp_avg": worker.exp_avg, "exp_avg_sq": worker.exp_avg_sq}
        save_file({**tensors, "model_version": np.array([worker.model_version])}, path / _STATE)

    def close(self) -> None:
        self._state = None

    @property
    def _name(self) -> str:
        return PARAMETER if self._worker.head is Head.POLICY else _VALUES


def _forward(worker: BigramWorker, batch: MicroBatch) -> Float32:
    check(batch, vocab_size=len(worker.table))
    where = np.flatnonzero(batch.position_ids > 0)
    predictions = np.zeros(batch.num_tokens, dtype=np.float32)
    predictions[where], _ = _predict(worker, batch, where)
    if not np.isfinite(predictions).all():
        raise NonFiniteError("the model's predictions are not finite: its weights are broken, restore a checkpoint")
    return predictions


def _predict(worker: BigramWorker, batch: MicroBatch, where: NDArray[np.intp]) -> tuple[Float64, Float64 | None]:
    """Return log-probs [N] of the tokens `where`, and [N, V] of all tokens; with a value head, values [N] and None."""
    rows = worker.table[batch.token_ids[where - 1]]
    if worker.head is Head.VALUE:
        return rows, None
    logprobs = log_softmax(rows, batch.temperatures[where]).astype(np.float64, copy=False)
    return logprobs[np.arange(len(where)), batch.token_ids[where]], logprobs


def _restored(fresh: BigramWorker, path: Path) -> BigramWorker:
    try:
        tensors = load_file(path / _STATE)
        version = int(tensors["model_version"][0])
        table, exp_avg, exp_avg_sq = (tensors[name] for name in ("table", "exp_avg", "exp_avg_sq"))
    except (OSError, KeyError, IndexError, SafetensorError) as error:
        raise StateError(f"{path / _STATE} is missing or damaged: {error}; restore another checkpoint") from error
    if any(array.shape != fresh.table.shape for array in (table, exp_avg, exp_avg_sq)):
        raise StateError(f"{path / _STATE} holds a table {table.shape}, but model and head make it {fresh.table.shape}")
    return BigramWorker(fresh.spec, fresh.head, table, exp_avg, exp_avg_sq, version)


def _columns(batch: MicroBatch, where: NDArray[np.intp]) -> dict[str, Any]:
    names = ("advantages", "weights", "behavior_logprobs", "temperatures")
    optional = ("old_logprobs", "ref_logprobs", "values", "returns", "kl_coefficients")
    columns = {name: column for name in (*names, *optional) if (column := getattr(batch, name)) is not None}
    return {name: column[where].astype(np.float64) for name, column in columns.items()} | {
        "loss_mask": batch.loss_mask[where],
        "segment_ids": batch.segment_ids[where],
        "rollout_ids": None if batch.rollout_ids is None else batch.rollout_ids[where],
        "streams": None if batch.streams is None else batch.streams[where],
        "num_segments": batch.num_segments,
    }
