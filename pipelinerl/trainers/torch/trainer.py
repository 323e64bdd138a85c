"""`TorchTrainer`, the trainer contract for any Hugging Face causal language model, as a policy or critic.

Weights and optimizer state are fp32 unless options say otherwise; `Precision.BF16` computes under autocast. Segments
are packed without padding. On CPU, and on CUDA with deterministic kernels, equal calls give equal bits. One process
uses a `TorchWorker`; for several in `options.mesh`, rank 0 uses what `registry.MESHES` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.models.context_limit import rotary_limit
from pipelinerl.trainers.torch.options import distributed_of, options_of
from pipelinerl.trainers.torch.worker import TorchWorker
from trainer_contract.batch import check, check_measures
from trainer_contract.errors import BatchError, ProtocolError, SpecError
from trainer_contract.host_weights import check_weights
from trainer_contract.trainer import started
from trainer_contract.types import (
    Float32,
    HostWeights,
    Kernels,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    StepStats,
    TrainerSpec,
)


class TorchTrainer:
    """Implementation of `trainer_contract.trainer.Trainer`, whose docstrings describe the methods."""

    def __init__(self) -> None:
        self._state: TorchWorker | None = None  # on a mesh, its leader, which has the same methods
        self._rotary_limit: int | None = None

    @property
    def model_version(self) -> int:
        return self._worker.model_version

    @property
    def width(self) -> int:
        return self._worker.width

    @property
    def _worker(self) -> TorchWorker:
        worker: TorchWorker = started(self._state)
        return worker

    def _check(self, micro_batches: Sequence[MicroBatch], needs: Iterable[str] = ()) -> None:
        vocab_size, routing = self._worker.loaded.vocab_size, self._worker.loaded.model.routing
        limit = self._rotary_limit
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=vocab_size, needs=needs, routing=routing)
            if limit is not None and (longest := int(micro_batch.position_ids.max()) + 1) > limit:
                raise BatchError(
                    f"a segment must have at most {limit} tokens, got {longest}: in longer ones, this model's rotary "
                    "embeddings depend on the longest segment of a batch"
                )

    def init_worker(self, spec: TrainerSpec) -> None:
        options = options_of(spec.options)
        distributed = distributed_of(spec.options, options.mesh)
        if spec.kernels is Kernels.BATCH_INVARIANT and (distributed or options.lora or options.compile):
            raise SpecError(
                "model.kernels = batch_invariant is for a trainer of one process, without adapters or compiled layers; "
                "leave out options.mesh, options.lora and options.compile, or model.kernels"
            )
        if distributed is None:
            self._state = TorchWorker.started(spec, options)
        else:
            self._state = imported(registry.MESHES["torch"].build).started(spec, options, distributed)
        self._rotary_limit = rotary_limit(self._worker.loaded.config.get_text_config().to_dict())

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        self._check(micro_batches)
        return self._worker.forward(micro_batches)

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        check_weights(weights, self.weight_layout())
        self._check(micro_batches)
        return self._worker.forward_at(micro_batches, weights)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        check_measures(objective, self._worker.spec.head)
        self._check(micro_batches, needs=objective.needs)
        return self._worker.backward(micro_batches, objective)

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        if not self._worker.has_gradient:
            raise ProtocolError("optimizer_step needs a gradient: call backward first")
        return self._worker.optimizer_step(learning_rate)

    def discard_gradient(self) -> None:
        self._worker.discard_gradient()

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        return self._worker.weight_layout()

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._worker.gather_weights()

    def save_state(self, path: Path) -> None:
        self._worker.save_state(path)

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None
