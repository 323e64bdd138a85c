"""Measure rollouts per second through the rollout queue, and bytes per sampled token.

    ours       encode, append in batches, read, decode, through RedisStream and records
    pickled    one pickled rollout per XADD, read one at a time

Both arms use one embedded Redis server. Targets for ours: at most 10 bytes per sampled token, and 4 times the
rollouts/s of `pickled`.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis

from benchmarks.measure import Paired, Row, paired, print_table, write_record
from pipelinerl.rng import generator
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import decode_group, encode_group
from pipelinerl.streams.redis_stream import RedisStream
from pipelinerl.streams.stream import START
from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn, Verdict, VersionSpan

MAX_BYTES_PER_TOKEN = 10.0
MIN_SPEED_UP = 4.0
DEPTH = 32


@dataclass(frozen=True, slots=True)
class Load:
    """A workload: groups of `group_size` rollouts with a prompt and responses of `shortest` to `longest` tokens."""

    name: str
    num_groups: int
    prompt_tokens: int
    shortest: int
    longest: int
    group_size: int = 16

    def groups(self) -> list[RolloutGroup]:
        """Return random groups, seeded by the load's name; a long response is sampled by up to three model versions."""
        random, groups = generator(0, "queue benchmark", self.name), []
        for number in range(self.num_groups):
            prompt = random.integers(0, 150_000, self.prompt_tokens, dtype=np.int32)
            rollouts = tuple(self._rollout(random, prompt) for _ in range(self.group_size))
            name = f"prompt-{number:06d}"
            groups.append(RolloutGroup(group_id=name, index=number, domain="math", actor="a0", rollouts=rollouts))
        return groups

    def _rollout(self, random: np.random.Generator, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> Rollout:
        length = int(random.integers(self.shortest, self.longest + 1))
        cuts = np.sort(random.integers(0, length + 1, 2)) if length >= 100 else np.array([0, 0])
        counts = np.diff([0, *cuts, length])
        spans = tuple(VersionSpan(300 + place, int(count)) for place, count in enumerate(counts) if count)
        turn = Turn(
            context_token_ids=prompt,
            token_ids=random.integers(0, 150_000, length, dtype=np.int32),
            behavior_logprobs=-random.exponential(0.3, length).astype(np.float32),
            spans=spans,
        )
        correct = bool(random.random() < 0.5)
        verdict = Verdict(outcome=Outcome.CORRECT if correct else Outcome.WRONG, reward=float(correct))
        return Rollout(turns=(turn,), verdict=verdict, finish_reason="stop", temperature=1.0, epoch=1)


LOADS = (
    Load("tiny", num_groups=256, prompt_tokens=12, shortest=10, longest=10),
    Load("realistic", num_groups=96, prompt_tokens=150, shortest=100, longest=1000),
)


async def ours(streams: RedisStream, groups: list[RolloutGroup]) -> None:
    """Encode the groups and append them in batches of `DEPTH`; then read them in such batches and decode them."""
    for start in range(0, len(groups), DEPTH):
        batch = [encode_group(group) for group in groups[start : start + DEPTH]]
        await streams.append("ours", batch, first_id=start + 1)
    offset, arrived = START, 0
    while arrived < len(groups):
        for entry in await streams.read({"ours": offset}, count=DEPTH, block_s=5.0):
            arrived += len(decode_group(entry.payload).rollouts) > 0
            offset = entry.entry_id


def pickled(client: Redis, records: Sequence[object]) -> None:
    """Send one XADD per pickled record, then one XREAD per record, with redis-py's blocking client."""
    for record in records:
        client.xadd("pickled", {"p": pickle.dumps(record)})
    offset: bytes = START.encode()
    for _ in records:
        answer: Any = client.xread({"pickled": offset}, count=1, block=5000)
        ((offset, fields),) = answer[0][1]
        pickle.loads(fields[b"p"])


def measure(load: Load, url: str, *, rounds: int) -> tuple[Paired, float]:
    """Return the rollouts/s of both arms, and the bytes per sampled token in our format."""
    groups = load.groups()
    payloads = [encode_group(group) for group in groups]
    num_rollouts = load.num_groups * load.group_size
    # The pickled arm is slow, so only a part of the load is used to measure its rate.
    few = groups[: max(8, load.num_groups // 8)]
    few_rollouts = len(few) * load.group_size
    with asyncio.Runner() as runner, Redis.from_url(url, protocol=2) as admin:
        streams = runner.run(RedisStream(url, namespace="bench").connect())

        def rate(work: Callable[[], object], count: int) -> Callable[[], float]:
            def arm() -> float:
                admin.flushall()
                start = time.perf_counter()
                work()
                return count / (time.perf_counter() - start)

            return arm

        arms = {
            "ours": rate(lambda: runner.run(ours(streams, groups)), num_rollouts),
            "pickled": rate(lambda: pickled(admin, [r for group in few for r in group.rollouts]), few_rollouts),
        }
        try:
            timings = paired(arms, rounds)
        finally:
            runner.run(streams.close())
    sampled = sum(rollout.num_sampled_tokens for group in groups for rollout in group.rollouts)
    return timings, sum(len(payload) for payload in payloads) / sampled


def run(quick: bool = False) -> None:
    """Measure each load, print the tables and, unless `quick`, write the record."""
    payload: dict[str, Any] = {"depth": DEPTH}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "server") as server:
        for load in LOADS:
            timings, size = measure(load, server.url, rounds=3 if quick else 15)
            speed_up = timings.ratio("ours", "pickled")
            rows = [
                Row("ours / pickled", speed_up, f">= {MIN_SPEED_UP:g}", speed_up.low >= MIN_SPEED_UP),
                Row("bytes per sampled token", size, f"<= {MAX_BYTES_PER_TOKEN:g}", size <= MAX_BYTES_PER_TOKEN),
            ]
            print_table(f"queue, {load.name} groups of {load.group_size}", rows)
            ratios = {"ours_over_pickled": speed_up.as_dict(), "bytes_per_sampled_token": size}
            payload[load.name] = ratios | timings.as_dict()
    write_record("queue", payload, quick=quick)
