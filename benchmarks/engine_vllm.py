"""Tokens/s of vLLM's engine over the torch engine's, behind the same contract, on the same two cores.

    ours    the torch engine, on one thread
    vllm    the vLLM engine: its core is a process of its own, on one thread (OMP_NUM_THREADS=1, nobind)

Same model (float32, attention heads of 32 dimensions, which vLLM's CPU attention knows), prompts, answer lengths and
sampling; all requests at once, as many slots as `engine` gives. Both return log-probs and version spans. It says at
which sizes which of the two is worth its start-up on a CPU; it says nothing of GPUs.

Needs vLLM: `make vllm`, then `.venv-vllm/bin/python -m benchmarks engine_vllm`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine import CONTEXT, LOADS, Job, ours
from benchmarks.measure import Paired, Row, paired, print_table, write_record
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.models.tiny_decoder import DebugSize, DecoderShape, char_tokenizer, random_decoder
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.registry import ENGINES
from trainer_contract.types import Device

TINY = DecoderShape(hidden=64, layers=2, heads=2, intermediate=128, vocab=56, max_positions=2048)
CONCURRENCY = (8, 64)


def torch_engine(path: Path, slots: int) -> BatchingEngine:
    """Ours, whose answers no token ends."""
    options = replace(_options(path, slots), device=Device.CPU)
    return BatchingEngine(options, load=lambda: load_runner(options), tokenizer=_endless())


def vllm_engine(path: Path, slots: int) -> BatchingEngine:
    """vLLM's, whose answers no token ends."""
    from pipelinerl.engines.external.vllm.engine import loop_of
    from pipelinerl.engines.external.worker.worker_endpoint import WorkerEndpointFactory

    options = _options(path, slots)
    loop = loop_of(options, WorkerEndpointFactory(frozenset()))
    return BatchingEngine(options, loop=loop, tokenizer=_endless())


def _options(path: Path, slots: int) -> EngineOptions:
    return EngineOptions(
        model_path=path, model_id="m", slots=slots, max_waiting=65536, context_length=CONTEXT, threads=1
    )


def _endless() -> ChatTokenizer:
    return ChatTokenizer(char_tokenizer(), ())


@contextmanager
def running(loop: asyncio.AbstractEventLoop, engine: BatchingEngine) -> Iterator[BatchingEngine]:
    """The engine, started and in the end closed."""
    loop.run_until_complete(engine.start())
    try:
        yield engine
    finally:
        loop.run_until_complete(engine.close())


def measure(path: Path, concurrency: int, *, vocab: int, rounds: int, batches: int) -> dict[str, Paired]:
    """Tokens/s of both arms for every load; vLLM is started once."""
    loop = asyncio.new_event_loop()

    def rate(engine: BatchingEngine, job: Job) -> Callable[[], float]:
        def arm() -> float:
            start = time.perf_counter()
            loop.run_until_complete(ours(engine, job))
            return job.num_tokens / (time.perf_counter() - start)

        return arm

    timings = {}
    with running(loop, torch_engine(path, concurrency)) as one, running(loop, vllm_engine(path, concurrency)) as other:
        for load in LOADS:
            job = Job.of(load, batches * concurrency, vocab=vocab)
            timings[load.name] = paired({"ours": rate(one, job), "vllm": rate(other, job)}, rounds)
    loop.close()
    return timings


def run(quick: bool = False) -> None:
    """Measure, print, record; without vLLM, say what to do."""
    if not ENGINES["vllm"].installed:
        print(
            "engine_vllm: vLLM is not installed here; `make vllm` makes an environment that has it, then "
            "`.venv-vllm/bin/python -m benchmarks engine_vllm`"
        )
        return
    torch.set_num_threads(1)
    shapes: dict[str, DecoderShape] = {"0.3 MB": TINY}
    if not quick:
        shapes |= {"3 MB": DebugSize.MB_3.value, "24 MB": DebugSize.MB_24.value}
    rounds, batches = (2, 1) if quick else (5, 2)
    rows, record = [], {}
    for size, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            random_decoder(shape).save_pretrained(folder)
            for concurrency in CONCURRENCY:
                loads = measure(Path(folder), concurrency, vocab=shape.vocab, rounds=rounds, batches=batches)
                for load, timings in loads.items():
                    ratio = timings.ratio("vllm", "ours")
                    name = f"{size}, {load}, {concurrency} at once"
                    rows += [Row(name, ratio), Row("    tokens/s of vLLM", timings.median("vllm"))]
                    record[name] = {"ratio": ratio.as_dict(), **timings.as_dict()}
    print_table("engine_vllm: tokens/s of vLLM over the torch engine", rows)
    write_record("engine_vllm", {"quick": quick, "loads": record})
