"""The checks of `gpu_check` on the torch engine: correctness, decode rate, and the cost of a weight update.

correctness  log-probs of sampled tokens against a plain transformers forward of the same tokens: fp32 against fp32;
             bf16 against fp32, where the error must be no larger than that of transformers in bf16
decode       tokens/s of full batches, relative to the limit set by memory: a step reads the weights and cache once
ragged       four heavy-tailed answers per slot: time of a decode step, relative to a step with equal answer lengths
continued    a conversation's second turn, whose prefix is cached: log-probs, cache hits, time relative to a new prompt
staging      peak memory of an engine with a memory share, from its start until after its first update
update       weights broadcast through the contract to an engine in another process while it decodes
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import served_engine
from benchmarks.gpu_device import Scale, bytes_per_second, copy_seconds, wait
from benchmarks.measure import Row, paired
from benchmarks.served_engine import EngineOrder, Load, LocalEngine, served
from benchmarks.torch_step import load_model
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import Backend
from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.numerics.causes import mismatch
from pipelinerl.system import http_client
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import Publication
from trainer_contract.types import Device, WeightDType


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A prompt, the tokens that the engine sampled after it, and their log-probs as f32."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: NDArray[np.float32]


def prompts(scale: Scale, count: int, *path: str | int, length: int | None = None) -> list[list[int]]:
    """Return random prompts of `length` tokens (None: the scale's length)."""
    draw = rng.generator(0, "gpu_check", *path)
    return draw.integers(6, scale.shape.vocab, (count, scale.prompt if length is None else length)).tolist()


@contextmanager
def local(
    folder: Path, scale: Scale, device: torch.device, dtype: WeightDType, *, context: int | None = None
) -> Iterator[LocalEngine]:
    """Start an engine in this process; `context` tokens per sequence, by default the scale's prompt and answer."""
    order = EngineOrder(
        folder=folder,
        slots=scale.slots,
        context=context or scale.prompt + scale.answer,
        device=device.type,
        dtype=dtype.value,
        prefill_tokens=scale.slots * scale.prompt,
    )
    with served_engine.local(order) as engine:
        yield engine


def sample(engine: LocalEngine, token_ids: Sequence[list[int]], tokens: int | Sequence[int]) -> list[SampledAnswer]:
    """Sample one answer per prompt; `tokens` is the answers' length, or a length for each answer."""
    lengths = [tokens] * len(token_ids) if isinstance(tokens, int) else tokens
    answers = engine.complete(
        [
            ChatCompletionRequest(prompt_token_ids=prompt, max_tokens=length, seed=seed, return_token_ids=True)
            for seed, (prompt, length) in enumerate(zip(token_ids, lengths, strict=True))
        ]
    )
    return [
        SampledAnswer(prompt, list(choice.token_ids or ()), np.array(choice.token_logprobs, np.float32))
        for prompt, answer in zip(token_ids, answers, strict=True)
        for choice in answer.choices
    ]


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


def check_correctness(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the engine's log-probs with those of transformers."""
    batch = prompts(scale, scale.parity_sequences, "correctness")
    exact = load_model(folder, device, torch.float32)
    with local(folder, scale, device, WeightDType.FLOAT32) as engine:
        sampled = sample(engine, batch, scale.answer // 4)
    ours = np.concatenate([each.logprobs for each in sampled])
    full = mismatch(ours, forward_logprobs(exact, sampled, device))
    with local(folder, scale, device, WeightDType.BFLOAT16) as engine:
        sampled = sample(engine, batch, scale.answer // 4)
    ours, truth = np.concatenate([each.logprobs for each in sampled]), forward_logprobs(exact, sampled, device)
    del exact
    half = mismatch(ours, truth)
    plain = mismatch(forward_logprobs(load_model(folder, device, torch.bfloat16), sampled, device), truth)
    excess = half.mean / plain.mean
    rows = [
        Row("engine fp32 - transformers fp32, largest |Δ logp|", full.max, "<= 1e-3", full.max <= 1e-3),
        Row("engine bf16 error / transformers' bf16 error, mean", excess, "<= 1.5", excess <= 1.5),
        Row("    engine bf16, mean |Δ logp| from fp32", half.mean),
    ]
    return rows, {"fp32_max": full.max, "bf16_mean": half.mean, "transformers_bf16_mean": plain.mean}


def check_decode(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare a full batch's decode rate with the memory limit; the rate is timed as long minus short answers."""
    batch, short = prompts(scale, scale.slots, "decode"), scale.answer // 4
    bandwidth = bytes_per_second(scale.copy_bytes, device)
    seconds: dict[int, list[float]] = {short: [], scale.answer: []}
    with local(folder, scale, device, WeightDType.BFLOAT16) as engine:
        for number in range(scale.rounds + 1):
            for tokens in seconds:
                wait(device)
                began = time.perf_counter()
                sample(engine, batch, tokens)
                if number:
                    seconds[tokens].append(time.perf_counter() - began)
        metrics = engine.engine.metrics()
    step_s = statistics.median(
        (long - brief) / (scale.answer - short) for brief, long in zip(*seconds.values(), strict=True)
    )
    per_token = metrics.cache_bytes / (scale.slots * (scale.prompt + scale.answer))
    step_bytes = metrics.weight_bytes + scale.slots * per_token * (scale.prompt + (short + scale.answer) / 2)
    roofline = step_bytes / bandwidth / step_s
    rows = [
        Row("decode tokens/s / roofline of the memory", roofline, ">= 0.30 (goal 0.60)", roofline >= 0.30),
        Row("    tokens/s", scale.slots / step_s),
        Row("    step / its reads at copy speed [ms]", f"{1e3 * step_s:.3f} / {1e3 * step_bytes / bandwidth:.3f}"),
        Row("    memory, read + write [GB/s]", bandwidth / 1e9),
    ]
    return rows, {
        "of_roofline": roofline,
        "tokens_per_s": scale.slots / step_s,
        "step_s": step_s,
        "step_bytes": step_bytes,
        "bytes_per_s": bandwidth,
        "slots": scale.slots,
    }


def check_ragged(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare decode steps of answers with log-normal lengths with steps of answers of equal lengths."""
    count = 4 * scale.slots
    drawn = rng.generator(0, "gpu_check", "ragged").lognormal(np.log(scale.answer / 8), 1.0, count)
    ragged = np.clip(drawn, 1, scale.answer).astype(int).tolist()
    lengths = {"ragged": ragged, "even": [round(sum(ragged) / count)] * count}
    batch = prompts(scale, count, "ragged")
    steps: dict[str, list[float]] = {name: [] for name in lengths}
    with local(folder, scale, device, WeightDType.BFLOAT16) as engine:

        def step_seconds(name: str) -> float:
            wait(device)
            before, began = engine.engine.metrics(), time.perf_counter()
            sample(engine, batch, lengths[name])
            steps[name].append(engine.engine.metrics().decode_steps_total - before.decode_steps_total)
            return (time.perf_counter() - began) / steps[name][-1]

        timings = paired({name: partial(step_seconds, name) for name in lengths}, scale.rounds)
        few = slice(0, scale.parity_sequences)
        sampled = sample(engine, batch[few], ragged[few])
    ours = np.concatenate([each.logprobs for each in sampled])
    plain = forward_logprobs(load_model(folder, device, torch.bfloat16), sampled, device)
    apart, ratio = mismatch(ours, plain).mean, timings.ratio("ragged", "even")
    rates = {name: sum(lengths[name]) / steps[name][-1] / timings.median(name) for name in lengths}
    rows = [
        Row("a step of ragged answers / one of equal lengths, time", ratio, "<= 1.25", ratio.median <= 1.25),
        Row("ragged answers, bf16: mean |Δ logp| from transformers", apart, "<= 0.02", apart <= 0.02),
        Row("    tokens/s, ragged / even", f"{rates['ragged']:.0f} / {rates['even']:.0f}"),
    ]
    return rows, {"step_over_even": ratio.as_dict(), "mean_apart": apart, "tokens_per_s": rates, "lengths": ragged}


def check_continued(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare a second turn, whose prefix the engine has cached, with a new prompt of the same length."""
    # The first prompt is long because only full blocks of the cache are reused: 256 tokens on CUDA.
    count, long, turn = min(scale.parity_sequences, scale.slots), 4 * scale.prompt, scale.answer // 4
    whole = long + turn + scale.prompt
    ratios, sampled, hits = [], [], 0.0
    with local(folder, scale, device, WeightDType.FLOAT32, context=whole + 1) as engine:

        def seconds(batch: Sequence[list[int]]) -> float:
            nonlocal sampled
            wait(device)
            began = time.perf_counter()
            sampled = sample(engine, batch, 1)
            return time.perf_counter() - began

        for number in range(scale.rounds + 1):
            begun = seconds(prompts(scale, count, "begun", number, length=whole))
            first = sample(engine, prompts(scale, count, "continued", number, length=long), turn)
            reused = engine.engine.metrics().reused_prompt_tokens_total
            following = prompts(scale, count, "following", number)
            again = seconds([each.prompt + each.token_ids + more for each, more in zip(first, following, strict=True)])
            hits = (engine.engine.metrics().reused_prompt_tokens_total - reused) / (count * (long + turn))
            if number:
                ratios.append(again / begun)
    exact = forward_logprobs(load_model(folder, device, torch.float32), sampled, device)
    apart = mismatch(np.concatenate([each.logprobs for each in sampled]), exact).max
    ratio = statistics.median(ratios)
    rows = [
        Row("continued turn fp32 - transformers fp32, largest |Δ logp|", apart, "<= 1e-3", apart <= 1e-3),
        Row("share of the first turn found in the cache", hits, ">= 0.8", hits >= 0.8),
        Row("a continued turn / a new one of its length, time", ratio, "<= 0.6", ratio <= 0.6),
    ]
    return rows, {"fp32_max": apart, "found": hits, "continued_over_new": ratio}


def check_staging(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Check that an engine keeps to its memory share during an update; on a CPU, the share bounds its cache."""
    is_cuda, share = device.type == "cuda", 0.5
    options = EngineOptions(
        model_path=folder,
        model_id="debug",
        slots=scale.slots,
        max_waiting=1,
        context_length=scale.prompt + scale.answer,
        device=Device(device.type),
        dtype=WeightDType.BFLOAT16,
        memory_share=share if is_cuda else None,
    )
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


@dataclass(slots=True)
class _Updates:
    pauses: list[float]
    totals: list[float]
    longest: list[float]
    control: list[float]
    steps: list[float]
    num_bytes: int


@contextmanager
def engine_apart(folder: Path, scale: Scale, device: torch.device) -> Iterator[tuple[str, Backend]]:
    """Start a busy engine in a separate process; yield its URL and the backend (gloo or NCCL) for weight updates."""
    # NCCL refuses two ranks on one device, so without a second GPU gloo carries the weights.
    apart = device.type == "cuda" and torch.cuda.device_count() > 1
    order = EngineOrder(
        folder=folder,
        slots=scale.slots,
        context=scale.prompt + scale.answer,
        load=Load(scale.slots, scale.answer),
        device=device.type,
        dtype="bfloat16",
    )
    with _visible("1" if apart else None), served(order) as engine:
        yield engine.url, Backend.NCCL if apart else Backend.GLOO


def check_update(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Measure how long decoding pauses for weight updates in flight."""
    with engine_apart(folder, scale, device) as (url, backend):
        source = load_model(folder, device, torch.bfloat16)
        done = asyncio.run(_updates(url, source, backend, scale.updates))
    copy = copy_seconds(done.num_bytes, device)
    pause, step = statistics.median(done.pauses), statistics.median(done.steps)
    extra = statistics.median(
        (longest - control) / step for longest, control in zip(done.longest, done.control, strict=True)
    )
    rows = [
        Row("update in flight: pause / copy of the same bytes", pause / copy, "<= 1.3", pause <= 1.3 * copy),
        Row("(longest gap - longest without an update) / step", extra, "<= 1", extra <= 1.0),
        Row("    backend, bytes", f"{backend}, {done.num_bytes / 1e9:.2f} GB"),
        Row("    pause / copy / whole update [ms]", _ms(pause, copy, statistics.median(done.totals))),
    ]
    return rows, {
        "backend": backend.value,
        "num_bytes": done.num_bytes,
        "pause_over_copy": pause / copy,
        "extra_gap_in_steps": extra,
        "seconds": {"pause": done.pauses, "total": done.totals, "longest": done.longest, "step": done.steps},
    }


async def _updates(url: str, source: Any, backend: Backend, count: int) -> _Updates:
    async with (
        EngineClient(state_timeout_s=60.0) as client,
        http_client.async_session(url, timeout_s=60.0) as plain,
    ):
        layout = (await client.models(url)).data[0].layout
        publisher = BroadcastPublisher(client, backend=backend)
        done = _Updates([], [], [], [], [], layout.num_bytes)
        for version in range(1, count + 2):  # the first update also forms the group, so its time is discarded
            await plain.get("/notes")
            report = await publisher.publish(
                Publication(
                    version=version,
                    epoch=1,
                    layout=layout,
                    weights=lambda: ((name, p.detach()) for name, p in source.named_parameters()),
                    engines=[url],
                    membership=1,
                )
            )
            during = _gaps((await plain.get("/notes")).json())
            await asyncio.sleep(max(1.0, report.total_s))
            after = _gaps((await plain.get("/notes")).json())
            card = (await client.models(url)).data[0]
            if (card.model_version, card.digest) != (version, report.digest):
                raise RuntimeError(f"expected version {version} with its digest to serve, got {card.model_version}")
            if version > 1:
                done.pauses.append(report.pauses_s[url])
                done.totals.append(report.total_s)
                # `during` is empty if fewer than two decode steps were recorded.
                done.longest.append(max(during, default=report.total_s))
                done.control.append(max(after, default=report.total_s))
                done.steps.append(statistics.median(after or [report.total_s]))
        await publisher.close()
    return done


def _gaps(notes: Sequence[float]) -> list[float]:
    return np.diff([note for note in notes if note > 0]).tolist()


def _ms(*seconds: float) -> str:
    return " / ".join(f"{1e3 * each:.3f}" for each in seconds)


@contextmanager
def _visible(device: str | None) -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device is not None:
        seen = before.split(",") if before else []
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(device)] if seen else device
    try:
        yield
    finally:
        if device is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
