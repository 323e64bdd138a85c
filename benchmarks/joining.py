"""Compare samples that join an engine's rows together (`Gathering`) with samples that join at once.

Answers have log-normal lengths, four for each row, and their prompts differ. Both arms take turns on one engine of a
small decoder: as fast as this CPU is, and with the times of one H200 imitated (0.87 billion weights, 64 rows, whose
prefill of one prompt delays the rows by some 12 ms). Target: at most 1.0 of the time; a GPU's, 0.7.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.measure import Row, paired, report
from benchmarks.served_engine import EngineOrder, LocalEngine, local
from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Gathering
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder

_SHAPE: Final = DecoderShape(hidden=64, layers=4, heads=4, kv_heads=2, intermediate=128, vocab=512, max_positions=2048)
_ROWS: Final = 64
_PROMPT: Final = 64
#: Most tokens of an answer; the median is an eighth.
_MOST: Final = (128, 512)
#: Seconds of a decode step and, beyond what it takes here, of a prefill.
_STEP_S: Final = 0.0025
_PREFILL_S: Final = 0.012


@contextmanager
def joins_at_once() -> Iterator[None]:
    """Let sequences take free rows without waiting."""
    with patch.object(Gathering, "may_join", lambda self, running: True):
        yield


def pace(engine: LocalEngine) -> None:
    """Let the engine's decode steps and prefills take as long as those of an H200."""
    runner: Any = engine.engine._loop._runner  # type: ignore[attr-defined]
    prefill, decode = runner.prefill, runner.decode

    def slow_prefill(prefills: Any) -> None:
        prefill(prefills)
        time.sleep(_PREFILL_S)

    def slow_decode(num_rows: int) -> Any:
        ends = time.perf_counter() + _STEP_S
        answer = decode(num_rows)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return answer

    runner.prefill, runner.decode = slow_prefill, slow_decode


def ratio(folder: Path, most: int, *, paced: bool, rounds: int) -> Any:
    """Return the time of the same answers together ÷ at once."""
    drawn = rng.generator(0, "joining", most).lognormal(np.log(most / 8), 1.0, 4 * _ROWS)
    lengths = np.clip(drawn, 1, most).astype(int).tolist()
    prompts = rng.generator(1, "joining").integers(6, _SHAPE.vocab, (len(lengths), _PROMPT)).tolist()
    with local(EngineOrder(folder=folder, slots=_ROWS, context=_PROMPT + most)) as engine:
        if paced:
            pace(engine)

        def seconds(answers: list[int]) -> float:
            began = time.perf_counter()
            engine.sample(prompts, answers)
            return time.perf_counter() - began

        def at_once() -> float:
            with joins_at_once():
                return seconds(lengths)

        arms: dict[str, Callable[[], float]] = {"at once": at_once, "together": lambda: seconds(lengths)}
        timings = paired(arms, rounds)
    return timings.ratio("together", "at once")


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    torch.set_num_threads(1)
    rows, results = list[Row](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        model: Any = random_decoder(_SHAPE)
        model.save_pretrained(name)
        for paced, target in ((False, 1.0), (True, 0.7)):
            for most in _MOST[: 1 if quick else None]:
                found = ratio(Path(name), most, paced=paced, rounds=2 if quick else 5)
                title = f"{'times of an H200' if paced else 'this CPU'}, answers of up to {most} tokens"
                rows.append(Row(f"{title}: together ÷ at once", found, f"<= {target}", found.median <= target))
                results[title] = found.as_dict()
    report("joining", rows, results, quick=quick, title="when sequences join an engine's rows")
