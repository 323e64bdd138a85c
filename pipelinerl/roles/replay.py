"""`pipelinerl replay`: take a step of a run again, from its checkpoint and streams, and compare.

    runs/<name>/  events.jsonl (which groups, which figures) · checkpoints/ (weights before) · redis/ (the groups)

Rollouts are kept from the oldest kept checkpoint on: earlier steps cannot be replayed. The run must not be live: what
is read are its files, the stream server's from a copy.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from pipelinerl.config import RunConfig, load
from pipelinerl.errors import RecordError, UserError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.events import Event, read_events
from pipelinerl.observability.story import tell
from pipelinerl.roles.parts import checkpoints_of, objective_of
from pipelinerl.roles.trainer_role import loop_settings
from pipelinerl.roles.workers import started
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.streams.records import decode_group
from pipelinerl.streams.stream import START
from pipelinerl.training import checkpoint
from pipelinerl.training.adaptive import AdaptiveObjective
from pipelinerl.training.admission import Lineage
from pipelinerl.training.replay import COMPARED, RecordedStep, Replay, ReplayedStep
from pipelinerl.types import RolloutGroup

#: The event with which a trainer begins.
_BEGUN: Final = "trainer_ready"
#: Figures that are shown without being compared.
_MORE: Final = ("kl_k3", "ess", "clip_fraction", "truncated_fraction")


def show(run_dir: Path, *, step: int, objective: str | None, console: Console) -> bool:
    """Replay step `step` and print it beside the record; True when both are the same to the bit.

    Args:
        objective: a preset to take that one step with instead.

    Raises:
        UserError: the run, the step, or what it needs is not there.
    """
    config = load(str(run_dir / "recipe.toml"))
    steps = _recorded(run_dir)
    if step not in steps:
        known = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise UserError(f"step {step} is not in {run_dir}/events.jsonl; its steps are {known}")
    place, state = _checkpoint_before(config, run_dir, step)
    groups = asyncio.run(_groups(config, run_dir))
    chosen = objective_of(config)
    workers = started(config, chosen, checkpoint=place)
    settings = loop_settings(config)
    adaptive = AdaptiveObjective(chosen, controller=settings.kl, restored=state.kl_coefficient)
    replay = Replay(
        step=workers.step(config.training.old_logprobs),
        objective=adaptive,
        groups=groups,
        token_budget=settings.micro_batch_tokens,
        shaping=settings.shaping,
    )
    first = state.model_version + 1
    try:
        before = range(first, step if objective else step + 1)
        replayed = []
        for each in replay.run([_step(steps, version) for version in before]):
            replayed.append(each)
            console.print(f"step {each.recorded.version}: {_verdict(each)}", highlight=False)
        if objective:
            _print_instead(replay.instead(steps[step], resolve(objective)), objective, console)
    except RecordError as error:
        raise UserError(str(error)) from None
    finally:
        workers.close()
    same = not any(each.differences for each in replayed)
    if not objective:
        _print_step(replayed[-1], console)
    return same


def _recorded(run_dir: Path) -> dict[int, RecordedStep]:
    try:
        events = read_events(run_dir / "events.jsonl")
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir} has no readable events.jsonl, so it is no run: {error}") from None
    begun = [Lineage(int(event["epoch"]), int(event["model_version"])) for event in events if event["kind"] == _BEGUN]
    return {version: _record(event, begun) for event in tell(events).steps if (version := int(event["step"]))}


def _record(event: Event, begun: Sequence[Lineage]) -> RecordedStep:
    version = int(event["step"])
    return RecordedStep(
        version=version,
        # Of a step that was taken twice the later counts: that of the last trainer which began below it.
        lineage=max((each for each in begun if each.began_at < version), key=lambda each: each.epoch),
        orders=tuple(event.get("orders", ())),
        figures={name: value for name, value in event.items() if isinstance(value, int | float)},
    )


def _step(steps: Mapping[int, RecordedStep], version: int) -> RecordedStep:
    if version not in steps or not steps[version].orders:
        raise RecordError(f"step {version} is not recorded with its groups: the log is of an older version, or cut")
    return steps[version]


def _checkpoint_before(config: RunConfig, run_dir: Path, step: int) -> tuple[Path | None, checkpoint.TrainingState]:
    """The newest whole checkpoint before the step; the run's own beginning where nothing was trimmed yet."""
    for path in reversed(checkpoints_of(config, run_dir).all()):
        state = checkpoint.load(path)
        if state.model_version < step:
            return path, state
    return None, checkpoint.TrainingState(model_version=0, epoch=0, offsets={}, ledger={}, controller={})


async def _groups(config: RunConfig, run_dir: Path) -> dict[int, list[RolloutGroup]]:
    """The groups that still lie in the streams, by order."""
    found: dict[int, list[RolloutGroup]] = {}
    with _server(config, run_dir) as url:
        stream = await open_stream(url, namespace=config.run.name)
        try:
            for partition in await stream.streams(ROLLOUTS):
                for entry in await stream.read({partition: START}, count=2**31, block_s=0):
                    group = decode_group(entry.payload)
                    found.setdefault(group.index, []).append(group)
        finally:
            await stream.close()
    return found


@contextmanager
def _server(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """The run's own server where the recipe names one, else a copy of the embedded one's data."""
    if config.streams.redis_url is not None:
        yield config.streams.redis_url
        return
    if (run_dir / "controller.json").exists():
        raise UserError(f"{run_dir} is live; stop it first (pipelinerl stop {run_dir}), or replay a copy of it")
    if not (run_dir / "redis").is_dir():
        raise UserError(f"{run_dir}/redis is missing: the rollouts of this run were not kept here")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-replay-") as place:
        shutil.copytree(run_dir / "redis", Path(place) / "redis")
        with EmbeddedRedis(Path(place) / "redis") as server:
            yield server.url


def _verdict(replayed: ReplayedStep) -> str:
    if not replayed.differences:
        return "the same to the bit"
    return "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in replayed.differences.items())


def _print_step(replayed: ReplayedStep, console: Console) -> None:
    _table(replayed, ("recorded", "replayed"), console)


def _print_instead(replayed: ReplayedStep, objective: str, console: Console) -> None:
    _table(replayed, ("recorded", objective), console)


def _table(replayed: ReplayedStep, headings: tuple[str, str], console: Console) -> None:
    table = Table("figure", *headings, title=f"step {replayed.recorded.version}")
    for name in (*COMPARED, *_MORE):
        values = (replayed.recorded.figures.get(name), replayed.figures.get(name))
        table.add_row(name, *("" if value is None else f"{value:.9g}" for value in values))
    console.print(table)
