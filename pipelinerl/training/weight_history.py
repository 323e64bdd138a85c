"""Copies, in host memory, of the published weights whose rollouts can still be trained under the staleness bound k.

    publish v ──▶ keep v, forget versions below v + 1 − k ──▶ forward pass of a step at each version in its batch

Only published weights are kept, since engines sample only with these. A version identifies one set of weights, even
across restarts, because rollouts of weights that a trainer restart abandoned never reach a step.

If k changes, the history follows at the next publication. Weights that were dropped, or are missing from the
checkpoint, are not replaced by others: rollouts that they sampled end as stale, with a warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from safetensors import SafetensorError, deserialize

from pipelinerl.errors import CheckpointError, RecordError
from pipelinerl.models.weight_writer import write_weights
from pipelinerl.types import RolloutGroup
from trainer_contract.errors import StateError
from trainer_contract.host_weights import check_weights, copied
from trainer_contract.trainer import Trainer
from trainer_contract.types import HostWeights, ParameterInfo

log = logging.getLogger("pipelinerl")
_PREFIX: Final = "version-"


class WeightHistory:
    """Copies of a policy's weights by version; a copy never changes."""

    def __init__(
        self,
        layout: Sequence[ParameterInfo],
        held: Mapping[int, HostWeights] = MappingProxyType({}),
    ) -> None:
        self._layout = tuple(layout)
        self._held = dict(held)
        self._missed: set[int] = set()

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for weights in self._held.values() for data in weights.values())

    def figures(self) -> dict[str, float]:
        return {"history_versions": float(len(self._held)), "history_bytes": float(self.num_bytes)}

    def keep(self, trainer: Trainer, *, version: int, acceptance: float) -> None:
        """Copy the weights before they are published; drop versions up to `version` − `acceptance`."""
        before = len(self._held)
        for older in [held for held in self._held if held < version + 1 - acceptance]:
            del self._held[older]
        if version not in self._held:
            self._held[version] = copied(trainer.gather_weights())
        if len(self._held) > before:
            log.info(
                "weights of %d versions are kept for old_logprobs: %d to %d, %.1f MiB on the host",
                len(self._held),
                min(self._held),
                version,
                self.num_bytes / 2**20,
            )

    def weights(self, version: int) -> HostWeights:
        """Return the weights of one version. Raises RecordError if the history does not have them."""
        if version not in self._held:
            raise RecordError(
                f"the weights of version {version} are no longer kept, so log-probs at them cannot be computed; "
                f"kept are {', '.join(map(str, self.versions)) or 'none'}"
            )
        return self._held[version]

    def covers(self, group: RolloutGroup) -> bool:
        """Return whether the history has the weights of all tokens of a group; each missing version is logged once."""
        versions = {span.model_version for one in group.rollouts for turn in one.turns for span in turn.spans}
        missing = versions - self._held.keys()
        if missing - self._missed:
            log.warning(
                "weights of version %s are not kept, so their samples cannot train and count as stale: "
                "k was lower when they were made, or the checkpoint was written without them",
                ", ".join(map(str, sorted(missing))),
            )
        self._missed |= missing
        return not missing

    # --- in a checkpoint -------------------------------------------------------------------------------------------

    def saver(self) -> Callable[[Path], None]:
        """Return a function that writes the versions held now (not at its call) into a directory, one file each."""
        layout, held = self._layout, dict(self._held)

        def save(path: Path) -> None:
            for version, weights in held.items():
                write_weights(path / f"{_PREFIX}{version:06d}.safetensors", layout, weights.items())

        return save

    @classmethod
    def restored(cls, path: Path, layout: Sequence[ParameterInfo]) -> Self:
        """Return the history saved in `path`; empty if nothing is. Raises CheckpointError if a file is unusable."""
        held = {}
        for file in sorted(path.glob(f"{_PREFIX}*.safetensors")):
            try:
                weights = {name: np.frombuffer(each["data"], np.uint8) for name, each in deserialize(file.read_bytes())}
                check_weights(weights, tuple(layout))
            except (OSError, SafetensorError, StateError) as error:
                raise CheckpointError(f"{file} cannot be used: {error}; choose another checkpoint") from error
            held[int(file.stem.removeprefix(_PREFIX))] = weights
        return cls(layout, held)
