"""Compare tokens/s of the torch engine with Hugging Face `generate` in static batches, on one thread.

    ours       all requests are sent together; the engine has `concurrency` rows and refills a row as soon as it is free
    generate   batches of `concurrency` requests in order, each as long as its longest answer

Both arms have the same model, prompts, sampling and answer lengths; only requested tokens count. Ours also returns
log-probs. In one load all answers have equal length. In the other, lengths are heavy-tailed (Pareto), so a static batch
waits for its longest answer. Targets for ours / generate: at least 1 with equal lengths; at least 2 with heavy tails,
goal 4.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Paired, Row, paired, report, seconds_of
from benchmarks.served_engine import EngineOrder, LocalEngine, local
from benchmarks.torch_step import generate, load_model
from pipelinerl import rng
from pipelinerl.plugins.warmstart.tiny_decoder import DebugSize, DecoderShape, random_decoder

TINY = DecoderShape(hidden=64, layers=2, heads=4, kv_heads=4, intermediate=128, vocab=56, max_positions=2048)
CONTEXT = 320


@dataclass(frozen=True, slots=True)
class Load:
    """A distribution of answer lengths: Pareto with exponent `tail`, clipped to `longest`; constant if `tail` is 0."""

    name: str
    shortest: int
    longest: int
    tail: float
    least_ratio: float

    def job(self, count: int, vocab: int) -> Job:
        """Return `count` requests with prompts of 8 to 24 random tokens."""
        random = rng.generator(1, "engine benchmark", self.name)
        prompts = [random.integers(6, vocab, size).tolist() for size in random.integers(8, 25, count)]
        if self.tail == 0:
            return Job(prompts, [self.shortest] * count)
        drawn = self.shortest * (1 + rng.generator(0, "engine benchmark", self.name).pareto(self.tail, count))
        return Job(prompts, np.minimum(drawn, self.longest).astype(int).tolist())


LOADS = (
    Load("equal", shortest=48, longest=48, tail=0, least_ratio=1.0),
    Load("heavy tails", shortest=8, longest=256, tail=1.0, least_ratio=2.0),
)


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, and the number of tokens to sample after each prompt."""

    prompts: list[list[int]]
    lengths: list[int]


def ours(engine: LocalEngine, job: Job) -> None:
    """Send all requests to our engine together, and wait for all answers."""
    answers = engine.sample(job.prompts, job.lengths)
    assert [len(answer.token_ids) for answer in answers] == job.lengths


def static_batches(model: Any, job: Job, concurrency: int) -> None:
    """Answer the requests with Hugging Face `generate`, in batches that wait for their longest answer."""
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
    for start in range(0, len(job.prompts), concurrency):
        batch = slice(start, start + concurrency)
        longest = max(job.lengths[batch])
        assert generate(model, job.prompts[batch], longest, pad_token_id=0, **settings).shape[1] == longest


def measure(path: Path, load: Load, concurrency: int, *, rounds: int, batches: int) -> Paired:
    """Return the tokens/s of our engine and of `generate`, for one load, over `rounds` rounds."""
    model = load_model(path, torch.device("cpu"), torch.float32)
    job = load.job(batches * concurrency, vocab=56)

    def rate(work: Callable[[], object]) -> Callable[[], float]:
        seconds = seconds_of(work)
        return lambda: sum(job.lengths) / seconds()

    with local(EngineOrder(folder=path, slots=concurrency, context=CONTEXT)) as engine:
        arms = {
            "ours": rate(lambda: ours(engine, job)),
            "generate": rate(lambda: static_batches(model, job, concurrency)),
        }
        return paired(arms, rounds)


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    torch.set_num_threads(1)
    shapes: dict[str, DecoderShape | DebugSize] = {"0.3 MB": TINY} | ({} if quick else {"3 MB": DebugSize.MB_3})
    rounds, batches = (2, 2) if quick else (5, 3)
    rows, record = [], {}
    for size, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            random_decoder(shape).save_pretrained(folder)
            for load in LOADS:
                for concurrency in (8, 32, 128):
                    timings = measure(Path(folder), load, concurrency, rounds=rounds, batches=batches)
                    ratio = timings.ratio("ours", "generate")
                    name = f"{size}, {load.name}, {concurrency} at once"
                    rows.append(Row(name, ratio, f">= {load.least_ratio:g}", ratio.low >= load.least_ratio))
                    rows.append(Row("    tokens/s of ours", timings.median("ours")))
                    record[name] = {"ratio": ratio.as_dict(), **timings.as_dict()}
    report("engine", rows, {"loads": record}, quick=quick, title="engine: tokens/s over Hugging Face generate")
