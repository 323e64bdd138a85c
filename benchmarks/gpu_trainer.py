"""The checks of `gpu_check` on trainers: cost over plain torch, utilisation, agreement with the engine, and JAX.

throughput  an RL step (forward, backward, clipping, AdamW) in bf16 through `TorchTrainer`, relative to the same step
            in plain torch on prepared tensors
MFU         model FLOPs utilisation: the step's FLOP/s, relative to the measured peak of a bf16 matrix product
parity      log-probs of the engine's samples against the trainer's forward of the same tokens
state       the optimizer's state on the host, or in bf16: log-probs after three steps, and the time of a step,
            against fp32 state on the device
vocabulary  the output layer and its loss with Qwen's vocabulary: error of the gradients, peak memory, and speed
publication speed of a backward pass while weights are broadcast to an engine in another process, relative to the speed
            of a backward pass alone
attention   torch's kernel (`varlen`) against buckets of padded segments, both in bf16: time, and error compared with
            buckets in fp32. Compared are output and gradients of one layer, for ragged segments (`ragged`), eight
            answers to each prompt (`shared`) and a sliding window (`window`), and the log-probs of a whole trainer step
jax         losses of three fp32 steps of the JAX trainer, against those of the torch trainer; time of a bf16 step of
            both; log-probs of the JAX engine's samples, against the torch trainer's for the same tokens
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import torch_step
from benchmarks.gpu_device import Scale, best_seconds, flops_per_second, wait
from benchmarks.gpu_engine import engine_apart, local, prompts
from benchmarks.measure import Paired, Row, bootstrap_median, paired, seconds_of
from benchmarks.served_engine import logprobs_of, publish
from benchmarks.torch_step import OBJECTIVE, losses, packed, rl_step, trainer_of
from inference_contract.weights import Backend
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.numerics.causes import Mismatch, mismatch
from pipelinerl.numerics.torch_logprobs import token_predictions
from pipelinerl.rng import generator
from pipelinerl.system.background import in_background
from pipelinerl.trainers.torch.packed.attention import AttentionPlan, Scores
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from pipelinerl.trainers.torch.packed.varlen import VarlenKernel, VarlenPlan, torch_kernel
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.broadcast.sender import WeightSender
from pipelinerl.weights.publisher import wire_layout
from trainer_contract.trainer import Trainer
from trainer_contract.types import MicroBatch, Precision, WeightDType

#: Learning rates of steps that are timed, and of steps after which log-probs are compared.
_RATE: Final = 1e-6
_VISIBLE_RATE: Final = 1e-5
_PUBLISH_S: Final = 60.0
#: Placements and dtypes of the optimizer's state to check; the allowed mean difference of log-probs after the steps.
_STATES: Final[Sequence[Mapping[str, str]]] = (
    {"place": "host"},
    {"moments": "bf16"},
    {"place": "host", "moments": "bf16"},
)
_STATE_APART: Final = 2e-2
_STATE_STEPS: Final = 3
#: Tolerances of attention: the relative difference from fp32, and the log-probs' error with the kernel, divided by
#: their error with buckets.
_APART: Final = 2e-2
_WORSE: Final = 1.2
_ANSWERS: Final = 8
#: By default, XLA would preallocate three quarters of the GPU's memory and compute fp32 products in TF32.
_XLA: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def random_batch(scale: Scale) -> MicroBatch:
    """Return a micro-batch of segments of random lengths, about `scale.trained_tokens` tokens in all."""
    count, prompt = max(2, scale.trained_tokens // scale.segment), scale.segment // 4
    lengths = generator(0, "gpu_check", "batch").integers(scale.segment // 2, scale.segment * 3 // 2, count).tolist()
    return torch_step.random_batch(lengths, [prompt] * count, vocab=scale.shape.vocab)


def step_flops(scale: Scale, batch: MicroBatch) -> float:
    """Return the floating-point operations of forward and backward."""
    # A weight matrix costs 6 operations per weight and token (the output layer only for trained tokens). Causal
    # attention has two products, each of half of length² x width.
    shape = scale.shape
    kv = (shape.kv_heads or shape.heads) / shape.heads
    layer = shape.hidden**2 * (2 + 2 * kv) + 3 * shape.hidden * shape.intermediate
    products = 6.0 * shape.layers * layer * batch.num_tokens
    output = 6.0 * shape.hidden * shape.vocab * int(batch.loss_mask.sum())
    lengths = np.bincount(batch.segment_ids).astype(np.float64)
    attention = 6.0 * shape.layers * shape.hidden * float((lengths**2).sum())
    return products + output + attention


def bare_step(folder: Path, batch: MicroBatch, device: torch.device) -> Callable[[], None]:
    """Return a function that does the trainer's step in plain torch, with the same attention as the trainer."""
    autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    plan = partial(VarlenPlan.of, kernel=torch_kernel()) if device.type == "cuda" else SegmentPlan.of
    rows = torch_step.laid_out(folder, batch, device=device, plan=plan, autocast=autocast)
    return torch_step.bare_step(rows, learning_rate=_RATE)


def check_throughput(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the trainer's speed with a loop in plain torch, and measure MFU."""
    batch, peak = random_batch(scale), flops_per_second(scale.matmul, device)
    trainer, bare = trainer_of(folder, device, Precision.BF16), bare_step(folder, batch, device)

    def in_plain_torch() -> None:
        bare()
        wait(device)

    step = partial(rl_step, trainer, batch, learning_rate=_RATE, device=device)
    timings = paired({"trainer": seconds_of(step), "bare": seconds_of(in_plain_torch)}, scale.rounds, warmup=2)
    trainer.close()
    throughput = timings.ratio("bare", "trainer")
    flops, seconds = step_flops(scale, batch), timings.median("trainer")
    used = flops / seconds / peak
    rows = [
        Row("trainer / bare torch, throughput", throughput, ">= 0.90 (goal 0.98)", throughput.median >= 0.90),
        Row("MFU of the trainer's step", used, ">= 0.45 (goal 0.50)", used >= 0.45),
        Row("    MFU of the bare loop", flops / timings.median("bare") / peak),
        Row("    tokens/s, measured peak [TFLOP/s]", f"{batch.num_tokens / seconds:.0f}, {peak / 1e12:.4g}"),
    ]
    return rows, {
        "throughput_against_bare_torch": throughput.as_dict(),
        "mfu": used,
        "peak_flops_per_s": peak,
        "step_flops": flops,
        "tokens": batch.num_tokens,
        "seconds": timings.as_dict(),
    }


def check_state(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare optimizer states on the host, or in bf16, with an fp32 state on the device."""
    batch, rows, results = random_batch(scale), list[Row](), dict[str, Any]()

    def measured(options: Mapping[str, Any]) -> tuple[NDArray[np.float32], float]:
        trainer = trainer_of(folder, device, Precision.BF16, options={"optimizer": options})
        step = partial(rl_step, trainer, batch, learning_rate=_VISIBLE_RATE, device=device)
        for _ in range(_STATE_STEPS):
            step()
        logprobs = trainer.forward([batch])[0]
        timings = paired({"step": seconds_of(step)}, scale.rounds)
        trainer.close()
        gc.collect()
        return logprobs, timings.median("step")

    expected, seconds = measured({})
    for options in _STATES:
        logprobs, taken = measured(options)
        name, apart = ", ".join(map(str, options.values())), float(np.abs(logprobs - expected).mean())
        rows.append(Row(f"state {name}: mean |Δ logp|", apart, f"<= {_STATE_APART:g}", apart <= _STATE_APART))
        rows.append(Row("    its step / one with fp32 moments on the device", taken / seconds))
        results[name] = {"apart": apart, "slower": taken / seconds}
    return rows, results


def check_parity(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the log-probs of engine and trainer in fp32 and bf16."""
    full, half = (
        disagreement(folder, scale, device, dtype, precision)
        for dtype, precision in ((WeightDType.FLOAT32, Precision.FP32), (WeightDType.BFLOAT16, Precision.BF16))
    )
    rows = [
        Row("engine - trainer fp32, largest |Δ logp|", full.max, "<= 1e-3", full.max <= 1e-3),
        Row("engine - trainer bf16, mean |Δ logp|", half.mean, "<= 0.02", half.mean <= 0.02),
        Row("    bf16, 95 % / largest", f"{half.p95:.4g} / {half.max:.4g}"),
    ]
    return rows, {"fp32_max": full.max, "bf16_mean": half.mean, "bf16_p95": half.p95, "bf16_max": half.max}


def disagreement(
    folder: Path, scale: Scale, device: torch.device, dtype: WeightDType, precision: Precision, library: str = "torch"
) -> Mismatch:
    """Return how the log-probs of an engine's samples differ from those of the torch trainer for the same tokens."""
    with local(folder, scale, device, dtype, library=library) as engine:
        sampled = engine.sample(prompts(scale, scale.parity_sequences, "parity"), scale.answer // 4)
    gc.collect()
    trainer = trainer_of(folder, device, precision)
    sequences = [each.prompt + each.token_ids for each in sampled]
    batch = packed(sequences, [scale.prompt] * len(sampled), [each.logprobs for each in sampled])
    theirs = trainer.forward([batch])[0][batch.loss_mask]
    trainer.close()
    return mismatch(logprobs_of(sampled), theirs)


def check_vocabulary(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare the gradients of a bf16 output layer with fp32 gradients computed from the definition."""
    del folder
    width, tokens, vocab = scale.shape.hidden, scale.trained_tokens, scale.head_vocab
    draw = generator(0, "gpu_check", "vocabulary")
    hidden = torch.from_numpy(draw.standard_normal((tokens, width), dtype=np.float32)).to(device, torch.bfloat16)
    head = torch.nn.Linear(width, vocab, bias=False, device=device)
    slopes = torch.from_numpy(draw.standard_normal(tokens, dtype=np.float32)).to(device)
    chosen = torch.from_numpy(draw.integers(0, vocab, tokens)).to(device)
    # Make the weights exact in bf16, so that only the arithmetic differs.
    head.weight.data = head.weight.data.bfloat16().float()
    inputs = (hidden.requires_grad_(), head.weight)

    def gradients() -> tuple[Tensor, ...]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            predictions = token_predictions(
                hidden, head, chosen, None, vocab_size=vocab, compiled=device.type == "cuda"
            )
        results = torch.autograd.grad(predictions[0], inputs, slopes)
        wait(device)
        return results

    seconds = best_seconds(gradients, device, tries=scale.rounds)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = gradients()
    peak = (torch.cuda.max_memory_allocated() - before) / (4 * tokens * vocab) if device.type == "cuda" else 0.0
    exact = _exact_gradients(hidden.detach().float(), head.weight.detach(), chosen, slopes)
    errors = [float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, exact, strict=True)]
    of_peak = 8.0 * tokens * width * vocab / seconds / flops_per_second(scale.matmul, device)
    rows = [
        Row("output layer, bf16: error of its gradient", errors[1], "<= 0.003", errors[1] <= 0.003),
        Row("    error of the hidden states' gradient", errors[0], "<= 0.01", errors[0] <= 0.01),
        Row("    peak memory / all logits in fp32", peak, "<= 0.5", peak <= 0.5),
        Row("    its products / peak of a bf16 product, logits recomputed", of_peak, ">= 0.4", of_peak >= 0.4),
    ]
    return rows, {"errors": errors, "peak_over_logits": peak, "of_peak": of_peak, "seconds": seconds, "vocab": vocab}


@torch.no_grad()
def _exact_gradients(hidden: Tensor, weight: Tensor, chosen: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp32 gradients of Σ slope · log-prob(chosen token) with respect to hidden states and weight."""
    of_hidden, of_weight, rows = torch.empty_like(hidden), torch.zeros_like(weight), 64
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        slope = (hidden[part] @ weight.T).softmax(-1).neg_()
        slope[torch.arange(len(slope), device=slope.device), chosen[part]] += 1.0
        slope *= slopes[part, None]
        of_hidden[part] = slope @ weight
        of_weight.addmm_(slope.T, hidden[part])
    return of_hidden, of_weight


def check_publication(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Time backward passes alone and while a thread publishes weights (over NCCL with a second GPU, else gloo)."""
    batch, trainer = random_batch(scale), trainer_of(folder, device, Precision.BF16)

    def backward() -> float:
        wait(device)
        began = time.perf_counter()
        trainer.backward([batch], OBJECTIVE)
        wait(device)
        trainer.discard_gradient()
        return time.perf_counter() - began

    backward()
    idle = WeightSender(wire_layout(trainer.weight_layout()), trainer.gather_weights, 2**24).send(
        None, deadline=time.monotonic() + _PUBLISH_S
    )
    alone_s, during_s, digests, totals = [], [], [], []
    with engine_apart(folder, scale, device) as (url, backend):
        for version in range(1, scale.updates + 2):  # the first update also forms the group, so its time is discarded
            alone_now = [backward() for _ in range(3)]
            publishing = in_background("publish", partial(asyncio.run, _published(trainer, url, backend, version)))
            during_now = [backward()]
            while not publishing.done():
                during_now.append(backward())
            digest, total_s = publishing.result()
            digests.append(digest)
            if version > 1:
                alone_s.append(float(np.median(alone_now)))
                during_s.append(float(np.mean(during_now)))
                totals.append(total_s)
    trainer.close()
    speed = bootstrap_median(np.divide(alone_s, during_s))
    differ = sum(digest != idle for digest in digests)
    rows = [
        Row("speed of backward passes during a publication / alone", speed, ">= 0.98", speed.median >= 0.98),
        Row("digests that differ from that of idle weights", differ, "0", differ == 0),
        Row("    backend, whole publication [s]", f"{backend}, {float(np.median(totals)):.3f}"),
    ]
    return rows, {"speed": speed.as_dict(), "alone_s": alone_s, "during_s": during_s, "publications_s": totals}


async def _published(trainer: Trainer, url: str, backend: Backend, version: int) -> tuple[str, float]:
    layout = wire_layout(trainer.weight_layout())
    async with EngineClient(state_timeout_s=60.0) as client:
        publisher = BroadcastPublisher(client, backend=backend)
        # Each publisher forms a group of its own, so it needs a new membership.
        report = await publish(publisher, version, layout, trainer.gather_weights, [url], membership=version)
        await publisher.close()
    return report.digest, report.total_s


def check_jax(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare JAX with torch; if JAX is missing or does not find the GPU, report that nothing was checked."""
    os.environ.update(_XLA)
    platform = None
    if importlib.util.find_spec("jax"):
        import jax

        platform = str(jax.default_backend())
    if platform is None or (platform == "cpu") != (device.type == "cpu"):
        return [Row("JAX trainer and engine", f"not checked: JAX finds {platform or 'no package'}")], {"checked": False}
    from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer

    batch = random_batch(scale)
    start = {"torch": partial(trainer_of, folder, device), "jax": partial(trainer_of, folder, device, kind=JaxTrainer)}
    values = [losses(begin(Precision.FP32), batch, learning_rate=_RATE) for begin in start.values()]
    apart = float(np.abs(np.subtract(*values)).max())
    trainers = {name: begin(Precision.BF16) for name, begin in start.items()}
    # Steps read results, so JAX's asynchronous work counts.
    steps = {name: partial(rl_step, each, batch, learning_rate=_RATE, device=device) for name, each in trainers.items()}
    timings = paired({name: seconds_of(step) for name, step in steps.items()}, scale.rounds)
    for trainer in trainers.values():
        trainer.close()
    slower = timings.ratio("jax", "torch").median
    largest = disagreement(folder, scale, device, WeightDType.FLOAT32, Precision.FP32, library="jax").max
    rows = [
        Row("JAX trainer fp32, largest |Δ loss| from torch", apart, "<= 1e-3", apart <= 1e-3),
        Row("JAX engine - torch trainer fp32, largest |Δ logp|", largest, "<= 1e-3", largest <= 1e-3),
        Row("    JAX step bf16 / torch's, time", slower),
    ]
    return rows, {"checked": True, "loss_apart": apart, "logprob_apart": largest, "step_over_torch": slower}


class Layer(NamedTuple):
    """One attention layer over a micro-batch of `tokens` tokens.

    `drawn`: random queries, keys, values and output gradient. `plans`: attention plans of `varlen` and of `buckets`.
    """

    name: str
    tokens: int
    plans: dict[str, AttentionPlan]
    drawn: Sequence[Tensor]
    window: int | None

    def apart(self) -> dict[str, float]:
        """Return each implementation's largest relative error of output and gradients, against buckets in fp32."""
        exact = _attended(self.plans["buckets"], [each.float() for each in self.drawn], self.window)
        return {arm: _largest(_attended(plan, self.drawn, self.window), exact) for arm, plan in self.plans.items()}

    def timed(self, rounds: int) -> Paired:
        """Time the kernel and the buckets, forward and backward, in seconds."""

        def once(plan: AttentionPlan) -> None:
            _attended(plan, self.drawn, self.window)
            wait(self.drawn[0].device)

        return paired({arm: seconds_of(partial(once, plan)) for arm, plan in self.plans.items()}, rounds)


def check_attention(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare torch's varlen kernel with padded buckets, on single layers and whole steps; without CUDA, do nothing."""
    if device.type != "cuda":
        return [Row("varlen against buckets", "not checked: the kernel is CUDA's")], {"checked": False}
    rows: list[Row] = []
    results: dict[str, Any] = {"checked": True}
    for layer in layers(torch_kernel(), scale, device, torch.bfloat16):
        apart, timings = layer.apart(), layer.timed(scale.rounds)
        name, error = f"attention, {layer.name}: varlen's largest |Δ| from fp32", apart["varlen"]
        rows += [
            Row(name, error, f"<= {_APART:g}", error <= _APART),
            Row("    that of buckets in bf16", apart["buckets"]),
            Row("    buckets / varlen, time", timings.ratio("buckets", "varlen")),
        ]
        sizes = {"tokens": layer.tokens, "computed": len(layer.drawn[0])}
        results[layer.name] = {"apart": apart, **sizes, **_times(timings)}
    more, results["step"] = _steps(folder, scale, device)
    return rows + more, results


def layers(kernel: VarlenKernel, scale: Scale, device: torch.device, dtype: torch.dtype) -> Iterator[Layer]:
    """Yield the layers `ragged`, `shared` and `window`, each with a plan for the varlen kernel and one for buckets."""
    ragged, window = random_batch(scale), scale.segment // 2
    for name, batch, limit in (("ragged", ragged, None), ("shared", _shared(scale), None), ("window", ragged, window)):
        distinct = Distinct.of(batch)
        plans: dict[str, AttentionPlan] = {
            "varlen": VarlenPlan.of(batch.position_ids, device, distinct, kernel=kernel),
            "buckets": SegmentPlan.of(batch.position_ids, device, distinct),
        }
        yield Layer(name, batch.num_tokens, plans, _drawn(scale, len(distinct.kept), device, dtype), limit)


def _steps(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    batch = random_batch(scale)
    step = partial(rl_step, batch=batch, learning_rate=_VISIBLE_RATE, device=device)

    def logprobs(trainer: Trainer) -> NDArray[np.float32]:
        before = trainer.forward([batch])[0]
        step(trainer)
        return np.concatenate((before, trainer.forward([batch])[0]))

    reference = trainer_of(folder, device, options={"attention": "buckets", "compile": False})
    exact = logprobs(reference)
    reference.close()
    kinds = ("varlen", "buckets")
    trainers = {arm: trainer_of(folder, device, Precision.BF16, options={"attention": arm}) for arm in kinds}
    errors = {arm: float(np.abs(logprobs(trainer) - exact).mean()) for arm, trainer in trainers.items()}
    timings = paired({arm: seconds_of(partial(step, trainer)) for arm, trainer in trainers.items()}, scale.rounds)
    for trainer in trainers.values():
        trainer.close()
    ratio = errors["varlen"] / errors["buckets"]
    rows = [
        Row("trainer: error of log-probs, varlen / buckets", ratio, f"<= {_WORSE:g}", ratio <= _WORSE),
        Row("    buckets, mean |Δ logp| from fp32 before and after a step", errors["buckets"]),
        Row("    a step, buckets / varlen, time", timings.ratio("buckets", "varlen")),
    ]
    return rows, {"errors": errors, **_times(timings)}


def _times(timings: Paired) -> Mapping[str, Any]:
    return {"buckets_over_varlen": timings.ratio("buckets", "varlen").as_dict(), "seconds": timings.as_dict()}


def _shared(scale: Scale) -> MicroBatch:
    """Return a micro-batch of about as many tokens as `random_batch`, in groups of answers that share their prompt."""
    draw, prompt = generator(0, "gpu_check", "shared"), scale.segment // 2
    sequences = []
    for _ in range(max(1, scale.trained_tokens // (scale.segment * _ANSWERS))):
        prompt_ids = draw.integers(0, scale.shape.vocab, prompt)
        for length in draw.integers(scale.segment // 4, scale.segment * 3 // 4, _ANSWERS):
            sequences.append([*prompt_ids.tolist(), *draw.integers(0, scale.shape.vocab, length).tolist()])
    return packed(
        sequences, [prompt] * len(sequences), [np.zeros(len(each) - prompt, np.float32) for each in sequences]
    )


def _drawn(scale: Scale, tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shape, draw = scale.shape, generator(0, "gpu_check", "attention")
    keys, width = shape.kv_heads or shape.heads, shape.hidden // shape.heads
    sizes = [(tokens, heads, width) for heads in (shape.heads, keys, keys, shape.heads)]
    return [torch.from_numpy(draw.standard_normal(size, dtype=np.float32)).to(device, dtype) for size in sizes]


def _attended(plan: AttentionPlan, drawn: Sequence[Tensor], window: int | None) -> tuple[Tensor, ...]:
    query, key, value = inputs = [each.detach().requires_grad_() for each in drawn[:3]]
    attended = plan.attend(query, key, value, Scores(window))
    return attended.detach(), *torch.autograd.grad(attended, inputs, drawn[3])


def _largest(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    return max(float((ours.float() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
