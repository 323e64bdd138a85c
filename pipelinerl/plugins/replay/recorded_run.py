"""The recorded steps of a finished run: their metrics, and the rollout groups on which they trained.

    runs/<name>/  recipe.toml · events.jsonl (metrics, and the groups' indices) · redis/ (the groups)

Rollouts are stored from the oldest kept checkpoint on. If the run had an embedded Redis server, it must not be live: a
server is then started on a copy of its data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelinerl.commands.remote import recorded_events, started_by_hand
from pipelinerl.config.recipe import RunConfig
from pipelinerl.enums import StalenessScope
from pipelinerl.errors import RecordError, UserError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.observability.run_history import tell
from pipelinerl.roles.role import REDIS_VARIABLE
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import decode_group
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import START
from pipelinerl.training.rollouts.admission import Lineage, fresh_part
from pipelinerl.types import RolloutGroup

log = logging.getLogger("pipelinerl")

#: Used as (number of the trainer process, its first version) of a step if the log names no trainer.
_UNKNOWN_TRAINER: Final = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as its run reported it: version, the trainer's lineage, its groups' indices (`orders`), and metrics."""

    version: int
    lineage: Lineage
    orders: Sequence[int]
    figures: Mapping[str, float]
    updates: Sequence[Mapping[str, float]] = ()
    """Figures of each optimizer step, if the step has several."""

    @property
    def learning_rates(self) -> list[float]:
        return [update["learning_rate"] for update in self.updates] or [self.figures["learning_rate"]]

    def part_of(self, group: RolloutGroup) -> RolloutGroup:
        """Return the part of a group that trained, without rollouts that were too old (`staleness.scope`)."""
        if "oldest_fresh" not in self.figures:
            return group
        bounds = StalenessBounds(1, self.version - self.figures["oldest_fresh"])
        part = fresh_part(group, producing=self.version, bounds=bounds, scope=StalenessScope.ROLLOUT)
        return part or group


def trained_groups(recorded: RecordedStep, groups: Mapping[int, Sequence[RolloutGroup]]) -> list[RolloutGroup]:
    """Return a step's groups: the first copy of each that fits its lineage. Raises RecordError."""
    chosen = []
    for index in recorded.orders:
        copies = [group for group in groups.get(index, ()) if recorded.lineage.includes(group)]
        if not copies:
            raise RecordError(
                f"the group of order {index}, of step {recorded.version}, is not in the streams any more: rollouts are "
                "kept from the oldest kept checkpoint on; raise checkpoint.keep to go back further"
            )
        chosen.append(recorded.part_of(copies[0]))
    return chosen


def recorded_steps(run_dir: Path) -> dict[int, RecordedStep]:
    """Return the recorded steps, keyed by the model version that they produced; raise `UserError` without a run."""
    events, steps = recorded_events(run_dir), {}
    begun = [(int(event["epoch"]), int(event["model_version"])) for event in events if event["kind"] == "trainer_ready"]
    for event in tell(events).steps:
        version = int(event["step"])
        # A restarted trainer may repeat steps; only the repetition is valid. So the step belongs to the latest trainer
        # that began at an earlier version. Without any, the step's groups are unknown.
        epoch, began_at = max((each for each in begun if each[1] < version), default=_UNKNOWN_TRAINER)
        steps[version] = RecordedStep(
            version=version,
            lineage=Lineage(epoch, began_at, earlier=tuple(each for each in begun if each[0] < epoch)),
            orders=() if (epoch, began_at) == _UNKNOWN_TRAINER else tuple(event.get("orders", ())),
            figures={name: value for name, value in event.items() if isinstance(value, int | float)},
            updates=event.get("updates", ()),
        )
    return steps


def recorded_step(run_dir: Path, step: int) -> RecordedStep:
    """Return one step; raise `UserError`, whose message lists the steps, if there is no such run or step."""
    steps = recorded_steps(run_dir)
    if step not in steps:
        known = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise UserError(f"step {step} is not in {run_dir}/events.jsonl; its steps are {known}")
    return steps[step]


def recorded_groups(config: RunConfig, run_dir: Path) -> dict[int, list[RolloutGroup]]:
    """Return the stored groups by the index of their order, in order of arrival. Raises UserError."""
    return asyncio.run(_groups(config, run_dir))


async def _groups(config: RunConfig, run_dir: Path) -> dict[int, list[RolloutGroup]]:
    groups: dict[int, list[RolloutGroup]] = {}
    with _server(config, run_dir) as url:
        stream = await open_stream(url, namespace=config.run.name)
        try:
            for partition in await stream.streams(ROLLOUTS):
                for entry in await stream.read({partition: START}, count=2**31, block_s=0):
                    try:
                        group = decode_group(entry.payload)
                    except RecordError as error:  # the trainer has skipped this record, too
                        log.warning("skipping a record in %s that cannot be read: %s", partition, error)
                        continue
                    groups.setdefault(group.index, []).append(group)
        finally:
            await stream.close()
    return groups


@contextmanager
def _server(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """Yield the URL of the recipe's Redis server, or of a server started on a copy of the run's embedded data."""
    if config.streams.redis_url is not None:
        yield os.environ.get(REDIS_VARIABLE) or config.streams.redis_url.get_secret_value()
        return
    if started_by_hand(run_dir):  # a killed controller leaves its address behind, but does not answer
        raise UserError(f"{run_dir} is live; stop it first: pipelinerl stop {run_dir}")
    if not (run_dir / "redis").is_dir():
        raise UserError(f"{run_dir}/redis is missing: the rollouts of this run were not kept here")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-recorded-") as place:
        shutil.copytree(run_dir / "redis", Path(place) / "redis")
        with EmbeddedRedis(Path(place) / "redis") as server:
            yield server.url
