"""The checks of `gpu_check` on the torch engine: correctness, decode rate, and the cost of a weight update.

correctness  log-probs of sampled tokens against a plain transformers forward of the same tokens: fp32 against fp32;
             bf16 against fp32, where the error must be no larger than that of transformers in bf16
decode       tokens/s of full batches, relative to the bandwidth limit: a step reads the weights and KV cache once
ragged       four heavy-tailed answers per batch row: time of a decode step, relative to a step with equal lengths
continued    a conversation's second turn, whose prefix is cached: log-probs, cache hits, time relative to a new prompt
staging      peak memory of an engine that may use half of the GPU, from its start until after its first update
update       weights broadcast through the contract to an engine in another process while it decodes
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import served_engine
from benchmarks.gpu_device import Scale, backend_of, copy_seconds
from benchmarks.joining import joins_at_once
from benchmarks.measure import Row, paired, seconds_of
from benchmarks.served_engine import EngineOrder, LocalEngine, SampledAnswer, engine_options, logprobs_of
from benchmarks.torch_step import load_model
from benchmarks.update_pause import update_meter
from inference_contract.schemas import EngineMetrics
from inference_contract.weights import Backend
from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.numerics.causes import mismatch
from trainer_contract.types import WeightDType


def prompts(scale: Scale, count: int, *path: str | int, length: int | None = None) -> list[list[int]]:
    """Return random prompts of `length` tokens (None: the scale's length)."""
    draw = rng.generator(0, "gpu_check", *path)
    return draw.integers(6, scale.shape.vocab, (count, scale.prompt if length is None else length)).tolist()


def order_of(folder: Path, scale: Scale, device: torch.device, dtype: WeightDType) -> EngineOrder:
    """Return the settings of an engine with the number of batch rows (`slots`) and the context length of `scale`."""
    context = scale.prompt + scale.answer
    return EngineOrder(folder=folder, slots=scale.slots, context=context, device=device.type, dtype=dtype.value)


def local(
    folder: Path, scale: Scale, device: torch.device, dtype: WeightDType, **changes: Any
) -> AbstractContextManager[LocalEngine]:
    """Start an engine as `order_of` describes it, in this process; `changes` replace fields of `EngineOrder`."""
    order = order_of(folder, scale, device, dtype)
    return served_engine.local(replace(order, prefill_tokens=scale.slots * scale.prompt, **changes))


@torch.inference_mode()
def forward_logprobs(model: Any, sampled: Sequence[SampledAnswer], device: torch.device) -> NDArray[np.float32]:
    """Return transformers' log-probs of all sampled tokens, from one plain forward per sequence."""
    parts = []
    for each in sampled:
        tokens = torch.tensor([each.prompt + each.token_ids], device=device)
        logits = model(tokens, use_cache=False).logits[0, len(each.prompt) - 1 : -1].float()
        picked = torch.tensor(each.token_ids, device=device)[:, None]
        parts.append(logits.log_softmax(-1).gather(-1, picked)[:, 0].cpu().numpy())
    return np.concatenate(parts)


def timed_sample(
    engine: LocalEngine, token_ids: Sequence[list[int]], tokens: int | Sequence[int]
) -> tuple[float, list[SampledAnswer]]:
    """Sample as `LocalEngine.sample` does; return the seconds it took, and the answers."""
    began = time.perf_counter()
    sampled = engine.sample(token_ids, tokens)
    return time.perf_counter() - began, sampled


def check_correctness(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the engine's log-probs with those of transformers."""
    batch = prompts(scale, scale.parity_sequences, "correctness")
    exact = load_model(folder, device, torch.float32)
    with local(folder, scale, device, WeightDType.FLOAT32) as engine:
        sampled = engine.sample(batch, scale.answer // 4)
    full = mismatch(logprobs_of(sampled), forward_logprobs(exact, sampled, device))
    with local(folder, scale, device, WeightDType.BFLOAT16) as engine:
        sampled = engine.sample(batch, scale.answer // 4)
    del exact
    excess, half, plain = _excess(folder, sampled, device)
    rows = [
        Row("engine fp32 - transformers fp32, largest |Δ logp|", full.max, "<= 1e-3", full.max <= 1e-3),
        Row("engine bf16 error / transformers' bf16 error, mean", excess, "<= 1.5", excess <= 1.5),
        Row("    engine bf16, mean |Δ logp| from fp32", half),
    ]
    return rows, {"fp32_max": full.max, "bf16_mean": half, "transformers_bf16_mean": plain}


def _excess(folder: Path, sampled: Sequence[SampledAnswer], device: torch.device) -> tuple[float, float, float]:
    """Return the engine's mean error in bf16 ÷ that of transformers in bf16, and both; fp32 is taken as exact."""
    truth = forward_logprobs(load_model(folder, device, torch.float32), sampled, device)
    plain = forward_logprobs(load_model(folder, device, torch.bfloat16), sampled, device)
    ours, theirs = mismatch(logprobs_of(sampled), truth).mean, mismatch(plain, truth).mean
    return ours / theirs, ours, theirs


def check_decode(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare a full batch's decode rate with the memory's limit; a step's time is that of long minus short answers."""
    batch, short = prompts(scale, scale.slots, "decode"), scale.answer // 4
    bandwidth = 2 * scale.copy_bytes / copy_seconds(scale.copy_bytes, device)  # each byte is read and written

    def step_of(early: bool | None) -> tuple[float, EngineMetrics]:
        with local(folder, scale, device, WeightDType.BFLOAT16, starts_early=early) as engine:
            arms = {"short": partial(engine.sample, batch, short), "long": partial(engine.sample, batch, scale.answer)}
            samples = paired({name: seconds_of(arm) for name, arm in arms.items()}, scale.rounds).samples
            metrics = engine.engine.metrics()
        return float(np.median(np.subtract(samples["long"], samples["short"]))) / (scale.answer - short), metrics

    (step_s, metrics), (late_s, _) = step_of(None), step_of(False)
    per_token = metrics.cache_bytes / (scale.slots * (scale.prompt + scale.answer))
    step_bytes = metrics.weight_bytes + scale.slots * per_token * (scale.prompt + (short + scale.answer) / 2)
    roofline = step_bytes / bandwidth / step_s
    rows = [
        Row("decode tokens/s / roofline of the memory", roofline, ">= 0.70", roofline >= 0.70),
        Row("    tokens/s", scale.slots / step_s),
        Row("    step / its reads at copy speed [ms]", f"{1e3 * step_s:.3f} / {1e3 * step_bytes / bandwidth:.3f}"),
        Row("    step without early start / step", late_s / step_s),
        Row("    memory, read + write [GB/s]", bandwidth / 1e9),
    ]
    return rows, {
        "of_roofline": roofline,
        "tokens_per_s": scale.slots / step_s,
        "step_s": step_s,
        "without_early_start_s": late_s,
        "step_bytes": step_bytes,
        "bytes_per_s": bandwidth,
        "slots": scale.slots,
    }


def check_ragged(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the time of a decode step between answers of log-normal lengths and answers of equal lengths."""
    count = 4 * scale.slots
    drawn = rng.generator(0, "gpu_check", "ragged").lognormal(np.log(scale.answer / 8), 1.0, count)
    ragged = np.clip(drawn, 1, scale.answer).astype(int).tolist()
    lengths = {"ragged": ragged, "even": [round(sum(ragged) / count)] * count}
    batch, steps = prompts(scale, count, "ragged"), dict[str, float]()
    with local(folder, scale, device, WeightDType.BFLOAT16) as engine:

        def step_seconds(name: str) -> float:
            before = engine.engine.metrics().decode_steps_total
            seconds, _ = timed_sample(engine, batch, lengths[name])
            steps[name] = engine.engine.metrics().decode_steps_total - before
            return seconds / steps[name]

        timings = paired({name: partial(step_seconds, name) for name in lengths}, scale.rounds)
        together = min(timed_sample(engine, batch, ragged)[0] for _ in range(2))
        with joins_at_once():
            at_once = min(timed_sample(engine, batch, ragged)[0] for _ in range(2))
        few = slice(0, scale.parity_sequences)
        sampled = engine.sample(batch[few], ragged[few])
    ratio, excess = timings.ratio("ragged", "even"), _excess(folder, sampled, device)[0]
    rates = {name: sum(lengths[name]) / steps[name] / timings.median(name) for name in lengths}
    rows = [
        Row("a step of ragged answers / one of equal lengths, time", ratio, "<= 1.25", ratio.median <= 1.25),
        Row("ragged answers, bf16 error / transformers' bf16 error, mean", excess, "<= 1.5", excess <= 1.5),
        Row("    ragged answers, time / that of samples that join at once", together / at_once),
        Row("    tokens/s, ragged / even", f"{rates['ragged']:.0f} / {rates['even']:.0f}"),
    ]
    return rows, {
        "step_over_even": ratio.as_dict(),
        "bf16_excess": excess,
        "together_over_at_once": together / at_once,
        "tokens_per_s": rates,
        "lengths": ragged,
    }


def check_continued(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare a second turn, whose prefix the engine has cached, with a new prompt of the same length."""
    # The first prompt is long because only full blocks of the cache are reused.
    count, long, turn = min(scale.parity_sequences, scale.slots), 4 * scale.prompt, scale.answer // 4
    whole = long + turn + scale.prompt
    ratios, sampled, hits = list[float](), list[SampledAnswer](), 0.0
    with local(folder, scale, device, WeightDType.FLOAT32, context=whole + 1) as engine:
        for number in range(scale.rounds + 1):
            new_s, _ = timed_sample(engine, prompts(scale, count, "begun", number, length=whole), 1)
            first = engine.sample(prompts(scale, count, "continued", number, length=long), turn)
            reused = engine.engine.metrics().reused_prompt_tokens_total
            following = prompts(scale, count, "following", number)
            second = [each.prompt + each.token_ids + more for each, more in zip(first, following, strict=True)]
            continued_s, sampled = timed_sample(engine, second, 1)
            hits = (engine.engine.metrics().reused_prompt_tokens_total - reused) / (count * (long + turn))
            if number:
                ratios.append(continued_s / new_s)
    truth = forward_logprobs(load_model(folder, device, torch.float32), sampled, device)
    error, ratio = mismatch(logprobs_of(sampled), truth).max, statistics.median(ratios)
    rows = [
        Row("continued turn fp32 - transformers fp32, largest |Δ logp|", error, "<= 1e-3", error <= 1e-3),
        Row("share of the first turn found in the cache", hits, ">= 0.8", hits >= 0.8),
        Row("a continued turn / a new one of its length, time", ratio, "<= 0.6", ratio <= 0.6),
    ]
    return rows, {"fp32_max": error, "found": hits, "continued_over_new": ratio}


def check_staging(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Check that an engine keeps to its share of the GPU during an update; on a CPU, check only its KV cache."""
    is_cuda, share = device.type == "cuda", 0.5
    options = engine_options(order_of(folder, scale, device, WeightDType.BFLOAT16))
    options = replace(options, memory_share=share if is_cuda else None)
    bound = 0 if is_cuda else 2**24
    runner = load_runner(options, cache_bytes=bound or None)
    runner.prefill([Prefill(each, [row]) for row, each in enumerate(prompts(scale, scale.slots, "staging"))])
    staged = runner.staging()
    staged.zero_()
    runner.finish_staging()
    runner.swap()
    cache, weights = runner.cache_bytes, staged.numel()
    peak = torch.cuda.max_memory_allocated() / torch.cuda.mem_get_info()[1] if is_cuda else share * cache / bound
    rows = [
        Row("largest share of the memory taken", peak, f"<= {share}", peak <= share),
        Row("    cache / one set of weights [MiB]", f"{cache / 2**20:.0f} / {weights / 2**20:.0f}"),
    ]
    return rows, {"peak_share": peak, "share": share, "cache_bytes": cache, "weight_bytes": weights}


@contextmanager
def engine_apart(folder: Path, scale: Scale, device: torch.device) -> Iterator[tuple[str, Backend]]:
    """Start a busy engine in a separate process; yield its URL and the backend (gloo or NCCL) for weight updates."""
    backend = backend_of(device)
    order = order_of(folder, scale, device, WeightDType.BFLOAT16)
    load, gpu = served_engine.Load(scale.slots, scale.answer), 1 if backend is Backend.NCCL else None
    with served_engine.served(replace(order, load=load, gpu=gpu)) as engine:
        yield engine.url, backend


def check_update(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Measure how long decoding pauses for weight updates in flight."""
    with engine_apart(folder, scale, device) as (url, backend):
        source = load_model(folder, device, torch.bfloat16)
        updates, num_bytes = asyncio.run(_updates(url, source, backend, scale.updates))
    copy = copy_seconds(num_bytes, device)
    seconds = {name: [each[name] for each in updates] for name in updates[0]}
    pause, total = statistics.median(seconds["pause"]), statistics.median(seconds["total"])
    extra = statistics.median((each["longest"] - each["control"]) / each["step"] for each in updates)
    rows = [
        Row("update in flight: pause / copy of the same bytes", pause / copy, "<= 1.3", pause <= 1.3 * copy),
        Row("(longest gap - longest without an update) / step", extra, "<= 1", extra <= 1.0),
        Row("    backend, bytes", f"{backend}, {num_bytes / 1e9:.2f} GB"),
        Row("    pause / copy / whole update [ms]", f"{1e3 * pause:.3f} / {1e3 * copy:.3f} / {1e3 * total:.3f}"),
    ]
    return rows, {
        "backend": backend.value,
        "num_bytes": num_bytes,
        "pause_over_copy": pause / copy,
        "extra_gap_in_steps": extra,
        "seconds": seconds,
    }


async def _updates(url: str, source: Any, backend: Backend, count: int) -> tuple[list[dict[str, float]], int]:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in source.named_parameters())

    async with update_meter(url, backend=backend) as meter:
        await meter.decoded(8)
        updates = [await meter.update(weights) for _ in range(count + 1)]
        return updates[1:], meter.layout.num_bytes  # the first update also forms the group, so its time is discarded
