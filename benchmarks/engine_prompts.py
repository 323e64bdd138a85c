"""What begins alike at the torch engine: what it costs to compute it, over as much that begins differently.

    prompts   32 with the same first tokens, as of a system prompt and examples, and tokens of their own after
    answers   decode steps of 32 rows in groups of 2, 4 or 8 that have sampled the same so far
    apart     as many of the same length that have nothing in common

Each round has other tokens, so that nothing is left of the one before; one thread.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.measure import Row, paired, print_table, seconds_of, write_record
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.models.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.rng import generator
from trainer_contract.types import Device

SHAPE = DecoderShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=704, vocab=512, max_positions=4096)
PROMPTS = 32
#: (tokens in common, tokens of its own).
LENGTHS = ((64, 20), (256, 32), (1024, 64))
#: In decode steps of fewer parameters calls outweigh products.
DECODED = DecoderShape(hidden=576, layers=8, heads=9, kv_heads=3, intermediate=1536, vocab=8192, max_positions=256)
GROUPS = (2, 4, 8)
_STEPS = 16


@final
class _Filled:
    """32 rows of a runner, filled with `common` + `own` tokens each, others every time."""

    def __init__(self, runner: TorchRunner, common: int, own: int) -> None:
        self._runner, self._common, self._own = runner, common, own
        self._draws = count()

    def __call__(self, *, alike: bool) -> None:
        draw = generator(next(self._draws), "engine_prompts")
        tokens = draw.integers(0, SHAPE.vocab, (PROMPTS, self._common + self._own))
        if alike:
            tokens[:, : self._common] = tokens[0, : self._common]
        self._runner.prefill([Prefill(each, [row]) for row, each in enumerate(tokens.tolist())])


def _runner(folder: str, context: int) -> TorchRunner:
    return load_runner(
        EngineOptions(
            model_path=Path(folder),
            model_id="m",
            max_waiting=PROMPTS,
            slots=PROMPTS,
            context_length=context,
            device=Device.CPU,
        )
    )


def decoding(runner: TorchRunner, size: int) -> float:
    """Seconds of some greedy steps of 32 rows, so many of which are alike at a time, after prompts of 64 tokens."""
    tokens = generator(size, "decoding").integers(0, DECODED.vocab, (PROMPTS // size, 65)).tolist()
    groups = [range(at * size, (at + 1) * size) for at in range(PROMPTS // size)]
    runner.prefill([Prefill(each[:-1], rows) for each, rows in zip(tokens, groups, strict=True)])
    runner.place(
        [
            RowState(row, each[-1], 64, noise_key=row, temperature=0.0, top_p=1.0, top_k=0)
            for each, rows in zip(tokens, groups, strict=True)
            for row in rows
        ]
    )
    began = time.perf_counter()
    for _ in range(_STEPS):
        runner.decode(PROMPTS)
    return time.perf_counter() - began


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows, payload = _decode_steps(folder, rounds=3 if quick else 9)
    with tempfile.TemporaryDirectory() as folder:
        random_decoder(SHAPE, seed=0).save_pretrained(folder)
        for common, own in LENGTHS[: 2 if quick else None]:
            filled = _Filled(_runner(folder, common + own + 1), common, own)
            arms = {"alike": seconds_of(partial(filled, alike=True)), "apart": seconds_of(partial(filled, alike=False))}
            timings = paired(arms, rounds=3 if quick else 9)
            ratio, share = timings.ratio("alike", "apart"), (common / PROMPTS + own) / (common + own)
            rows.append(Row(f"{PROMPTS} prompts of {common} + {own} tokens: alike / apart", ratio, f"({share:.2f})"))
            payload[f"{common}+{own}"] = {"ratio": ratio.as_dict(), "share_of_tokens": share, **timings.as_dict()}
    print_table("what begins alike (its tokens)", rows)
    write_record("engine_prompts", {"quick": quick, **payload})
    return payload


def _decode_steps(folder: str, *, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    random_decoder(DECODED, seed=0).save_pretrained(folder)
    runner = _runner(folder, 128)
    timings = paired({str(size): partial(decoding, runner, size) for size in (1, *GROUPS)}, rounds=rounds)
    ratios = {size: timings.ratio(str(size), "1") for size in GROUPS}
    name = f"decode step of {PROMPTS} rows: {{}} alike at a time / all apart"
    rows = [Row(name.format(size), ratio, f"({1 / size:.2f})") for size, ratio in ratios.items()]
    return rows, {f"decode, {size} alike": {"ratio": ratio.as_dict()} for size, ratio in ratios.items()}
