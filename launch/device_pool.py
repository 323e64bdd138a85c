"""`DevicePool`: whose the devices are while engines come and go; two processes share one only where shares allow it.

A process without a share has its devices to itself. What is given back is free at once, so it is for the caller to give
back only what no process holds any more.
"""

from __future__ import annotations

from typing import final

from launch.placement import Assignment, Placement
from pipelinerl.config.recipe import RunConfig

#: Sums of shares are compared up to this: they are decimal fractions.
_ROUNDING = 1e-6


@final
class DevicePool:
    """The devices of a launch, with those that hold them."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self._config = config
        self._devices = placement.devices
        self._held = dict(placement.assignments)

    @property
    def holders(self) -> frozenset[str]:
        """Names of the processes that hold devices."""
        return frozenset(self._held)

    def take(self, name: str, *, type: str) -> Assignment | None:
        """Devices for an engine of that type; None when too few are free. Those that nobody else is on come first."""
        needs = self._config.gpus_of_engine(type) if self._devices.each else 0
        if not needs:
            return Assignment()
        share = self._config.engine.memory_share
        may_share = share is not None and self._config.weights.backend != "nccl"
        wanted = (share if may_share else None) or 1.0
        used = [self._used(index) for index in range(len(self._devices))]
        fitting = [index for index in range(len(used)) if used[index] + wanted <= 1.0 + _ROUNDING]
        chosen = sorted(sorted(fitting, key=lambda index: used[index])[:needs])
        if len(chosen) < needs:
            return None
        self._held[name] = Assignment(tuple(chosen), share)
        return self._held[name]

    def give_back(self, name: str) -> None:
        """The process is gone, and holds nothing."""
        self._held.pop(name, None)

    def refusal(self, name: str, *, type: str) -> str:
        """Why an engine gets no devices, and what would free some."""
        needs = self._config.gpus_of_engine(type)
        labels = [self._devices.label(index) for index in range(len(self._devices))]
        whose = [
            ", ".join(holder for holder in self._held if i in self._held[holder].indices) for i in range(len(labels))
        ]
        state = "; ".join(f"{label}: {who or 'free'}" for label, who in zip(labels, whose, strict=True))
        return (
            f"{name} takes {needs} GPU{'s' if needs > 1 else ''}, and too few are free ({state}); take an engine out "
            "first, or start the run with an engine.memory_share and a trainer.memory_share that leave room for another"
        )

    def _used(self, index: int) -> float:
        """How much of a device's memory is spoken for, 1 being all."""
        return sum(1.0 if each.share is None else each.share for each in self._held.values() if index in each.indices)
