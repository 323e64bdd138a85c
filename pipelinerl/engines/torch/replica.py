"""`EngineReplica`: log-probs as the torch engine computes them, for the trainer's check of coarse arithmetic.

With int8 weights or in bfloat16, an engine's log-probs are up to 0.1 nats from the trainer's, which would hide faults.
The replica decodes the given tokens with the engine's own code, weights and dtype, and differs by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.weights import bytes_in
from trainer_contract.host_weights import bytes_of
from trainer_contract.types import Float32, HostWeights, MicroBatch

#: Number of answers decoded at once, as in a canary.
_ROWS: Final = 8


class EngineReplica:
    """A torch engine's model on the CPU, of a few rows, without a server. Call `hold` before the other methods."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model that `options` describe; raise `ModelError` as the engine does."""
        self._wire: torch.dtype = getattr(torch, (options.wire_dtype or options.dtype).value)
        self._runner = load_runner(replace(options, slots=_ROWS), starts_early=False)

    def hold(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Take the trainer's weights (`Trainer.gather_weights`, or the items of `HostWeights`) as an engine does."""
        into = {spec.name: (spec, part) for spec, part in bytes_in(self._runner.staging(), self._runner.layout)}
        for name, values in weights:
            sent = torch.from_numpy(np.array(bytes_of(values))).view(self._wire)
            spec, part = into[name]
            part.copy_(sent.to(getattr(torch, spec.dtype.value)).view(torch.uint8))
        self._runner.finish_staging()
        self._runner.swap()

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch's sampled tokens; 0 for other tokens."""
        return [self._scored(batch) for batch in micro_batches]

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """Run `forward` with the given weights; then hold those from before again."""
        self.hold(weights.items())
        scored = self.forward(micro_batches)
        self._runner.swap()
        return scored

    def _scored(self, batch: MicroBatch) -> Float32:
        logprobs = np.zeros(batch.num_tokens, np.float32)
        starts = np.flatnonzero(batch.position_ids == 0)
        segments = list(zip(starts.tolist(), [*starts[1:].tolist(), batch.num_tokens], strict=True))
        for first in range(0, len(segments), _ROWS):
            part = segments[first : first + _ROWS]
            begins = [start + int(np.argmax(batch.loss_mask[start:end])) for start, end in part]
            scored = self._runner.decoded_logprobs(
                [batch.token_ids[start:begin].tolist() for (start, _), begin in zip(part, begins, strict=True)],
                [batch.token_ids[begin:end].tolist() for (_, end), begin in zip(part, begins, strict=True)],
                [float(batch.temperatures[start]) for start, _ in part],
            )
            for (_, end), begin, its in zip(part, begins, scored, strict=True):
                logprobs[begin:end] = its
        return logprobs
