"""What is kept of the tokens of an engine that dies, and what it costs that they come while they are sampled.

    cost    groups asked for in turn with and without an interval: tokens/s, and the processor time of the pool's
            process and of the engine's, per sample
    kept    an engine is killed (SIGKILL) at a random moment while it samples long answers, and another goes on: of the
            tokens that it had sampled, as it had counted them a moment before, the share that is in the answers

The engines are real but for the model, whose step is a sleep: what is measured is all that lies around it. No token
ends a sample: every answer is as long as is asked for. Without an interval nothing is kept.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import psutil

from benchmarks.measure import Row, bootstrap_median, paired, print_table, write_record
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import ModelRunner
from pipelinerl.engines.bigram.engine import BigramRunner
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import char_tokenizer
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.rng import generator
from pipelinerl.system.http_service import listen, serve
from pipelinerl.types import Answered

GROUPS: Final = 4
SAMPLES: Final = 8
TOKENS: Final = 256
CONTEXT: Final = 320
STEP_S: Final = 0.02
INTERVAL_S: Final = 1.0
_PROMPT: Final = [6, 7, 8, 9]
_START_TIMEOUT_S: Final = 60.0


@final
class _Sleeper:
    """A runner whose steps take `STEP_S` and no processor; everything else is the runner's own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """One step."""
        time.sleep(STEP_S)
        return [5] * num_rows, [-0.5123456] * num_rows


@dataclass(frozen=True, slots=True)
class Served:
    """Where an engine is."""

    url: str
    pid: int


def _serve(port: Connection) -> None:
    """The engine's process: sends its port."""
    tokenizer = ChatTokenizer(char_tokenizer(), ())
    model = BigramModel.random(tokenizer.vocab_size, seed=1, context_length=CONTEXT)
    load: Any = lambda: _Sleeper(BigramRunner(model, rows=GROUPS * SAMPLES))  # noqa: E731
    options = EngineOptions(
        model_path=Path(), model_id="m", slots=GROUPS * SAMPLES, max_waiting=4096, context_length=CONTEXT
    )
    app = create_app(BatchingEngine(options, load=load, tokenizer=tokenizer), token=None)
    listener = listen("127.0.0.1", 0)
    port.send(listener.getsockname()[1])
    serve(app, listener)


@contextmanager
def served() -> Iterator[Served]:
    """An engine in a process of its own. Raises `RuntimeError` when it does not start."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"the engine did not start within {_START_TIMEOUT_S:g} s")
        assert process.pid is not None
        url = f"http://127.0.0.1:{ours.recv()}"
        asyncio.run(_answers(url))
        yield Served(url, process.pid)
    finally:
        process.kill()
        process.join(10)


async def _answers(url: str) -> None:
    async with EngineClient(state_timeout_s=_START_TIMEOUT_S) as client:
        await client.health(url)  # its listener queues us until it serves


@dataclass(frozen=True, slots=True)
class Spent:
    """What one batch of groups took: seconds, and processor seconds of the pool's process and of the engine's."""

    wall_s: float
    pool_s: float
    engine_s: float


def _requests() -> list[ChatCompletionRequest]:
    return [
        ChatCompletionRequest(prompt_token_ids=_PROMPT, n=SAMPLES, max_tokens=TOKENS, seed=seed, return_token_ids=True)
        for seed in range(GROUPS)
    ]


async def _answered(pool: EnginePool) -> list[Answered]:
    return await asyncio.gather(*(pool.complete(request) for request in _requests()))


def _spent(engine: Served, interval_s: float) -> Spent:
    """All groups, once."""

    async def work() -> Spent:
        process = psutil.Process(engine.pid)
        async with EngineClient() as client:
            pool = EnginePool(client, [engine.url], interval_s=interval_s)
            await client.health(engine.url)
            before = process.cpu_times()
            wall, own = time.perf_counter(), time.process_time()
            await _answered(pool)
            after = process.cpu_times()
            used = after.user + after.system - before.user - before.system
            return Spent(time.perf_counter() - wall, time.process_time() - own, used)

    return asyncio.run(work())


def cost(rounds: int) -> dict[str, Any]:
    """Paired: with an interval, and without."""
    spent: dict[str, list[Spent]] = {"whole": [], "in parts": []}
    with served() as engine:

        def arm(name: str, interval_s: float) -> float:
            spent[name].append(_spent(engine, interval_s))
            return GROUPS * SAMPLES * TOKENS / spent[name][-1].wall_s

        timings = paired(
            {"whole": lambda: arm("whole", 0.0), "in parts": lambda: arm("in parts", INTERVAL_S)}, rounds=rounds
        )
    pairs = list(zip(spent["in parts"], spent["whole"], strict=True))[-rounds:]  # those before warm up
    extra = bootstrap_median([(a.engine_s - b.engine_s) / (GROUPS * SAMPLES) * 1e3 for a, b in pairs])
    own = {
        name: 1e3 * float(np.median([one.pool_s for one in all_])) / GROUPS / SAMPLES for name, all_ in spent.items()
    }
    speed = timings.ratio("in parts", "whole")
    print_table(
        f"answers in parts every {INTERVAL_S} s: {GROUPS} groups of {SAMPLES} samples of {TOKENS} tokens",
        [
            Row("tokens/s, in parts / whole", speed, ">= 0.97", speed.median >= 0.97),
            Row("engine's process: further processor time per sample (ms)", extra),
            Row("pool's process: processor time per sample, whole (ms)", f"{own['whole']:.3f}"),
            Row("pool's process: processor time per sample, in parts (ms)", f"{own['in parts']:.3f}"),
        ],
    )
    return {
        "speed": speed.as_dict(),
        "engine_extra_ms_per_sample": extra.as_dict(),
        "pool_ms_per_sample": own,
        **timings.as_dict(),
    }


async def _share_kept(dies: Served, stays: Served, fraction: float) -> tuple[float, int]:
    """Kill `dies` after so much of an answer's time; the share kept of its tokens, and how many it had."""
    async with EngineClient() as client:
        before = (await client.metrics(dies.url))["generated_tokens_total"]
        pool = EnginePool(client, [dies.url], interval_s=INTERVAL_S)
        running = asyncio.create_task(_answered(pool))
        await asyncio.sleep(fraction * TOKENS * STEP_S)
        sampled = (await client.metrics(dies.url))["generated_tokens_total"] - before
        os.kill(dies.pid, signal.SIGKILL)
        pool.update([stays.url], finishing=[dies.url])
        answers = await running
    for answer in answers:
        for choice in answer.completion.choices:
            assert choice.token_ids is not None and len(choice.token_ids) == TOKENS
    return sum(answer.tokens_kept for answer in answers) / sampled, int(sampled)


def kept(rounds: int) -> dict[str, Any]:
    """One death a round, at a moment of its own."""
    shares: list[float] = []
    had: list[int] = []
    with served() as stays:
        for fraction in generator(0, "kept tokens").uniform(0.1, 0.9, size=rounds):
            with served() as dies:
                share, sampled = asyncio.run(_share_kept(dies, stays, float(fraction)))
            shares.append(share)
            had.append(sampled)
    median = bootstrap_median(shares)
    total = float(np.dot(shares, had) / sum(had))
    print_table(
        f"an engine dies in the middle of {GROUPS} groups of {SAMPLES} samples of {TOKENS} tokens, {rounds} times",
        [
            Row("share of its tokens that is kept", median, "before: 0"),
            Row("the same, of all tokens", f"{total:.3f}", "before: 0"),
        ],
    )
    return {"share": median.as_dict(), "share_of_all": total, "shares": shares, "sampled": had}


def run(quick: bool) -> dict[str, Any]:
    """Both halves."""
    record = {"cost": cost(2 if quick else 10), "kept": kept(2 if quick else 12)}
    if not quick:
        write_record("kept_tokens", record)
    return record


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
