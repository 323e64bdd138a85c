"""Compare the log-probs that engine and trainer compute for the same tokens under the same weights.

The real engine samples groups that share their prompts, at several temperatures, and receives new weights in flight.
The real trainer recomputes every token's log-prob with the weights that sampled the token. In fp32 the two must agree
to 1e-5 for every token, in bf16 to 0.01 at P95, and with batch-invariant kernels bit for bit. When an update reaches a
sample in flight, the engine recomputes the sample's KV cache (`recompute_kv`), so all differences are numerical.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gateway import order as prompt_order
from benchmarks.measure import Row, report
from benchmarks.served_engine import EngineOrder, engine_options
from benchmarks.torch_step import random_batch, trainer_of
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest
from inference_contract.weights import OnUpdate
from pipelinerl.actor.rollouts import Answer, rollouts_of
from pipelinerl.config.recipe import MODELS
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.torch.engine import from_options
from pipelinerl.models.checkpoint import load_model, save_model
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.numerics.causes import Mismatch, mismatch
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.training.packing import WeightedRollout, pack
from pipelinerl.types import Outcome, Rollout, Sampling, Verdict
from trainer_contract.trainer import Trainer
from trainer_contract.types import HeadPrecision, Kernels, Precision

TINY = MODELS / "tiny_speller"
TEMPERATURES = (0.7, 1.0, 1.5)
GROUP = 8
#: Targets for the difference of log-probs: the maximum in fp32, P95 in bf16, and a stricter goal for P95 in bf16.
FP32_MAX, BF16_P95, BF16_GOAL = 1e-5, 0.01, 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A variant to compare: the precision and kernels of both engine and trainer, and the engine's truncation."""

    precision: Precision
    head: HeadPrecision
    kernels: Kernels = Kernels.FAST
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """The arm's name in tables and records."""
        name = f"{self.precision}, head {self.head}"
        return name if self.kernels is Kernels.FAST else f"{name}, {self.kernels}"

    @property
    def dtype(self) -> Any:
        """The dtype of the model directory and therefore of the engine."""
        return "float32" if self.precision is Precision.FP32 else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Log-prob differences between engine and trainer in one arm, over both model versions together and by version.

    `bit_equal` is the share of tokens whose log-probs have the same bits; `switched` is the number of samples that the
    update reached in flight.
    """

    all_tokens: Mismatch
    versions: dict[int, Mismatch]
    bit_equal: float
    switched: int


def measure(model: Path, arm: Arm, *, prompts: int, seed: int = 0) -> Parity:
    """Sample `prompts` groups with an update in flight, recompute the log-probs with the trainer, and compare."""
    rollouts = _sample_with_update(model, arm, prompts=prompts, seed=seed)
    weighted = [
        WeightedRollout(rollout=rollout, advantages=np.ones(rollout.num_sampled_tokens), token_weight=1e-3)
        for rollout in rollouts
    ]
    batches = [packed.micro_batch for packed in pack(weighted, token_budget=2048)]
    pairs: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for version in (0, 1):
        trainer, ours, theirs = _trainer(model, arm, version=version), [], []
        for batch in batches:
            tokens = batch.loss_mask & (batch.behavior_versions == version)
            ours.append(trainer.forward([batch])[0][tokens])
            theirs.append(batch.behavior_logprobs[tokens])
        trainer.close()
        pairs[version] = np.concatenate(ours), np.concatenate(theirs)
    every = [np.concatenate(side) for side in zip(*pairs.values(), strict=True)]
    return Parity(
        all_tokens=mismatch(every[0], every[1]),
        versions={version: mismatch(*pair) for version, pair in pairs.items()},
        bit_equal=float((every[0] == every[1]).mean()),
        switched=sum(map(_is_switched, rollouts)),
    )


def _is_switched(rollout: Rollout) -> bool:
    return rollout.oldest_version != rollout.newest_version


def _sample_with_update(model: Path, arm: Arm, *, prompts: int, seed: int) -> list[Rollout]:
    for attempt in range(5):
        rollouts = asyncio.run(_sample(model, arm, prompts=prompts, seed=seed + attempt))
        if any(map(_is_switched, rollouts)):
            return rollouts
    raise RuntimeError(f"no update reached any of {prompts * GROUP} samples in flight; give more prompts")


async def _sample(model: Path, arm: Arm, *, prompts: int, seed: int) -> list[Rollout]:
    """Sample groups with the real engine; when the first group has ended, the engine switches to a second version."""
    order = EngineOrder(folder=model, slots=2 * GROUP, context=64, dtype=arm.dtype)
    options = replace(engine_options(order), head_precision=arm.head, kernels=arm.kernels)
    engine = cast(BatchingEngine, from_options(options))
    await engine.start()
    trainer = _trainer(model, arm, version=1)
    staged = [(tensor.contiguous().view(-1).view(torch.uint8)) for _, tensor in trainer.gather_weights()]
    engine.staging()[:] = torch.cat(staged)
    engine.finish_staging()
    trainer.close()
    requests = list(_requests(model, seed, prompts, arm.top_p))
    answers = [asyncio.create_task(engine.complete(request)) for request in requests]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    await engine.commit(version=1, epoch=1, on_update=OnUpdate.RECOMPUTE_KV)
    done = await asyncio.gather(*answers)
    await engine.close()
    return [rollout for pair in zip(requests, done, strict=True) for rollout in _rollouts(*pair)]


def _requests(model: Path, seed: int, count: int, top_p: float) -> Iterator[ChatCompletionRequest]:
    vocab = ChatTokenizer.load(model).vocab_size
    for number in range(count):
        draw = generator(seed, "parity", number)
        yield ChatCompletionRequest(
            prompt_token_ids=draw.integers(5, vocab, int(draw.integers(3, 24))).tolist(),
            n=GROUP,
            max_tokens=36,
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            top_p=top_p,
            policy_logprobs=top_p < 1,
            seed=number,
            return_token_ids=True,
        )


def _rollouts(request: ChatCompletionRequest, completion: ChatCompletion) -> list[Rollout]:
    sampling = Sampling(num_samples=GROUP, temperature=request.temperature)
    verdict = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    answers = [Answer(completion, choice, verdict) for choice in completion.choices]
    return [made.rollout for made in rollouts_of(replace(prompt_order(0), sampling=sampling), answers)]


def _trainer(model: Path, arm: Arm, *, version: int) -> Trainer:
    """Return a trainer after `version` optimizer steps; equal arguments give bit-identical weights."""
    trainer = trainer_of(model, precision=arm.precision, head_precision=arm.head, kernels=arm.kernels)
    batch = random_batch([48], [8], vocab=50)
    ones = batch.loss_mask.astype(np.float32)
    batch = replace(batch, advantages=ones, behavior_logprobs=-2 * ones)
    for _ in range(version):
        trainer.backward([batch], resolve("grpo"))
        if trainer.optimizer_step(learning_rate=3e-3).grad_norm == 0:
            raise RuntimeError("the update changed no weight; the second version would be the first")
    return trainer


def model_in(folder: Path, dtype: Any) -> Path:
    """Return the directory of the shipped model; if it has another dtype, convert it to `dtype` below `folder`."""
    if dtype == "float32":
        return TINY
    path = folder / dtype
    if not path.exists():
        save_model(load_model(TINY, dtype=dtype), ChatTokenizer.load(TINY), path)
    return path


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    arms = [
        Arm(precision=precision, head=head, kernels=kernels)
        for precision, head, kernels in product(Precision, HeadPrecision, Kernels)
    ]
    rows, record = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in arms:
            result = measure(model_in(Path(folder), arm.dtype), arm, prompts=12 if quick else 60)
            p95, largest = result.all_tokens.p95, result.all_tokens.max
            if arm.precision is Precision.FP32:
                rows.append(Row(f"{arm.name}: max |Δ log-prob|", largest, "<= 1e-5", largest <= FP32_MAX))
            else:
                target = f"<= {BF16_P95:g} (goal {BF16_GOAL:g})"
                rows.append(Row(f"{arm.name}: P95 |Δ log-prob|", p95, target, p95 <= BF16_P95))
                rows.append(Row("  max", largest))
            share = f"{result.bit_equal:.2%} of {result.all_tokens.num_tokens:,}"
            is_exact = arm.kernels is Kernels.BATCH_INVARIANT
            met = result.bit_equal == 1 if is_exact else None
            rows.append(Row("  tokens with equal bits", share, "all" if is_exact else "", met))
            record[arm.name] = {
                **asdict(result.all_tokens),
                "bit_equal": result.bit_equal,
                "by_version": {version: asdict(each) for version, each in result.versions.items()},
                "samples_updated_in_flight": result.switched,
            }
    payload = {"arms": record, "temperatures": TEMPERATURES, "group_size": GROUP}
    report("parity", rows, payload, quick=quick, title="parity of engine and trainer, tiny_speller on the CPU")
