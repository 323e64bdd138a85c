"""Measure if a thousand episodes with slow tools keep engines busy, and if a multi-turn game trains.

    busy       `Crowd`: groups of episodes run through an actor's gateway, episode hosts (processes that run the
               environments) and engine pool, on engines with paced decode steps. After each answer a tool takes 0.01 to
               60 s (log-uniform, mean seven). When a group's last episode ends, the next group begins. The result is
               the share of the engines' decode slots that are occupied, times the share of time in which engines have
               work.
    learning   `examples/guess_letter` with a bigram model, until the mean reward of `WINDOW` steps reaches `LEARNT`

After the measurement, the groups in progress get time to end: the warm-up time, and twice the longest time that an
episode's tools could take. The episodes of a group that then has not ended count as stuck.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import games, paced
from benchmarks.arms import Job, train, training_clock
from benchmarks.gateway import order
from benchmarks.measure import Row, recorded_parts, report
from benchmarks.processes import open_many_files, spawned
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.plugins.episodes.group import EpisodeDomain, Episodes
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts
from pipelinerl.system.background import cancel_all
from pipelinerl.system.http_service import listen, serve

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "guess_letter" / "guess_letter.toml"
LEARNT: Final = 0.8
WINDOW: Final = 10
_PARTS: Final = ("busy", "learning")
_MAX_TOKENS: Final = 48
_CONTEXT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Size of the load: concurrent groups of episodes, and the engines that answer them."""

    groups: int = 125
    group_size: int = 8
    engines: int = 2
    slots: int = 48
    step_s: float = 0.15
    longest_tool_s: float = 60.0
    warm_s: float = 60.0
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Crowded:
    """Result of a crowd: share of the engines' decode slots that were busy, and numbers of ended and stuck episodes."""

    busy: float
    episodes: int
    stuck: int


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2), only: Sequence[str] = _PARTS) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    rows, payload = list[Row](), recorded_parts("episodes", _PARTS)
    if "busy" in only:
        crowd = (
            Crowd(groups=12, slots=8, warm_s=3.0, seconds=5.0, longest_tool_s=3.0, step_s=0.02) if quick else Crowd()
        )
        crowded = busy(crowd)
        name = f"{crowd.groups * crowd.group_size} episodes at once, {crowd.engines * crowd.slots} slots"
        rows += [
            Row(f"{name}: share of slots that decode", crowded.busy, ">= 0.9", crowded.busy >= 0.9),
            Row(f"{name}: stuck, of {crowded.episodes} ended", crowded.stuck, "0", crowded.stuck == 0),
        ]
        payload["busy"] = asdict(crowded)
    if "learning" in only:
        payload["learning"] = [learning(seed) for seed in seeds[: 1 if quick else None]]
        for each in payload["learning"]:
            name, took = f"guess_letter, seed {each['seed']}", each["seconds"]
            shown = f"{each['first']:.2f} -> {each['last']:.2f}"
            in_time = took is not None and took <= 60
            rows += [
                Row(f"{name}: reward", shown, f">= {LEARNT}", each["last"] >= LEARNT),
                Row(f"{name}: seconds of training to {LEARNT}", "never" if took is None else took, "<= 60", in_time),
            ]
    report("episodes", rows, payload, quick=quick)


# --- learning ---------------------------------------------------------------------------------------------------------


def learning(seed: int) -> dict[str, Any]:
    """Train once; return the mean reward at start and end, and the seconds until it is `LEARNT`."""
    with tempfile.TemporaryDirectory(prefix="guess-letter-") as folder:
        changes = games.guessing(Path(folder) / "model")
        history = train(Job("guess_letter", seed, str(EXAMPLE), changes), judged=False).history
    rewards = [step["reward"] for step in history.steps]
    means = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    clock = training_clock(history)
    reached = next((clock[place + WINDOW - 1] for place, mean in enumerate(means) if mean >= LEARNT), None)
    return {"seed": seed, "first": means[0], "last": means[-1], "seconds": reached}


# --- engines below a crowd of episodes --------------------------------------------------------------------------------


def busy(crowd: Crowd) -> Crowded:
    """Play the crowd's episodes for `crowd.seconds` after the warm-up."""
    open_many_files()
    with tempfile.TemporaryDirectory(prefix="episodes-") as folder, _engines(crowd, Path(folder)) as urls:
        return asyncio.run(_play(crowd, urls))


@contextmanager
def _engines(crowd: Crowd, folder: Path) -> Iterator[list[str]]:
    paced.save_bigram(folder, context_length=_CONTEXT)
    with ExitStack() as stack:
        yield [stack.enter_context(spawned(_serve, crowd, folder)).first for _ in range(crowd.engines)]


def _serve(crowd: Crowd, folder: Path, pipe: Connection) -> None:
    open_many_files()
    options = EngineOptions(
        model_path=folder, model_id="paced", slots=crowd.slots, max_waiting=4096, context_length=_CONTEXT
    )
    engine = paced.engine(options, lambda _: crowd.step_s)
    with listen("127.0.0.1", 0) as bound:
        pipe.send(f"http://127.0.0.1:{bound.getsockname()[1]}")
        serve(create_app(engine, token=None), bound)


async def _play(crowd: Crowd, urls: Sequence[str]) -> Crowded:
    client = EngineClient(token=None)
    hosts = EpisodeHosts("benchmarks.games:use_tools", {"longest_s": crowd.longest_tool_s})
    longest_s = 2 * games.MOST_TURNS * crowd.longest_tool_s + crowd.warm_s
    limits = EpisodeSection(max_turns=games.MOST_TURNS, timeout_s=2 * longest_s)
    domain = EpisodeDomain(player=hosts, limits=limits, verifier=None, correct_at=1.0)
    stops_at = time.monotonic() + crowd.warm_s + crowd.seconds
    ended = 0

    async def work(maker: Episodes, worker: int) -> None:
        nonlocal ended
        number = worker
        while time.monotonic() < stops_at:
            made = await maker.make(order(number, _MAX_TOKENS, num_samples=crowd.group_size), GroupProgress())
            ended += len(made)
            number += crowd.groups

    try:
        maker = Episodes(EnginePool(client, urls), {"d": domain}, attempts=2)
        async with maker.serve():
            workers = [asyncio.create_task(work(maker, worker)) for worker in range(crowd.groups)]
            await asyncio.sleep(crowd.warm_s)
            before = [await client.metrics(url) for url in urls]
            await asyncio.sleep(crowd.seconds)
            after = [await client.metrics(url) for url in urls]
            done, stuck = await asyncio.wait(workers, timeout=longest_s)
            await cancel_all(stuck)
            await asyncio.gather(*done)
    finally:
        await hosts.close()
        await client.close()
    shares = [
        (new["occupied_slot_steps_total"] - old["occupied_slot_steps_total"])
        / max(1.0, new["decode_steps_total"] - old["decode_steps_total"])
        / crowd.slots
        * min(1.0, (new["busy_s_total"] - old["busy_s_total"]) / crowd.seconds)
        for old, new in zip(before, after, strict=True)
    ]
    return Crowded(fmean(shares), ended, len(stuck) * crowd.group_size)
