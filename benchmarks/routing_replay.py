"""How far a mixture's sampler and trainer are apart when each chooses experts, and when the sampler's are replayed.

A small Qwen3-MoE is first trained on sums, so that its routers have something to choose by. The torch engine then
samples answers in several arithmetics, and tells the experts of each token; the torch trainer computes the log-probs of
the same tokens in fp32, once with its own routers' choice and once with the sampler's. Both arms see the same tokens.

    python -m benchmarks routing_replay [--quick]

`routed apart` is the share of (token, layer) at which the two sets of experts differ. float32 is the control.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.measure import write_record
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest
from pipelinerl.actor.rollouts import Answer, rollouts_of as made_rollouts
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import from_options
from pipelinerl.enums import RoutingReplay, WeightFormat
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tiny_decoder import END, SPECIAL_TOKENS, char_tokenizer
from pipelinerl.models.torch_routers import TorchRouteLog, shape_of
from pipelinerl.numerics.mismatch import mismatch
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.rollouts.packing import alone, with_columns
from pipelinerl.types import Outcome, Problem, PromptOrder, Purpose, Rollout, Sampling, Verdict
from trainer_contract.types import Device, MicroBatch, TrainerSpec, WeightDType

CONTEXT: Final = 48
STEPS: Final = 400
PROMPTS: Final = 64
SAMPLES: Final = 8
TOKENS: Final = 16
_BATCH: Final = 48

#: How the engine computes: dtype, and how it keeps linear layers.
ENGINES: Final = (
    (WeightDType.FLOAT32, WeightFormat.NATIVE),
    (WeightDType.BFLOAT16, WeightFormat.NATIVE),
    (WeightDType.FLOAT32, WeightFormat.INT8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """|Δ log p| in nats over `tokens`, and the ESS of the ratios; `routed_apart` is a share of (token, layer)."""

    engine: str
    experts: str
    tokens: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    ess: float
    routed_apart: float


def sums(number: int, count: int) -> list[str]:
    """`count` texts such as `37+5=42`, the `number`th batch of them."""
    pairs = generator(number, "routing_replay", "sums").integers(0, 100, (count, 2)).tolist()
    return [f"{a}+{b}={a + b}" for a, b in pairs]


def trained_mixture(path: Path, *, steps: int) -> None:
    """Write a Qwen3-MoE of 4 layers of 8 experts, 2 for each token, that has learnt sums for so many steps."""
    tokenizer = char_tokenizer()
    kind: Any = Qwen3MoeConfig
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        eos_token_id=SPECIAL_TOKENS.index(END),
    )
    model: Any = Qwen3MoeForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            drawn = generator(0, "routing_replay", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(torch.from_numpy(drawn * np.float32(0.05)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        rows = [tokenizer(text)["input_ids"] + [config.eos_token_id] for text in sums(step, _BATCH)]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        seen = tokens != 0
        # Balanced while it is made, as such models are; in RL no such loss is added.
        loss = model(
            input_ids=tokens, attention_mask=seen, labels=tokens.masked_fill(~seen, -100), output_router_logits=True
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


async def sampled(path: Path, dtype: WeightDType, weights: WeightFormat, *, prompts: int) -> list[ChatCompletion]:
    """Answers of an engine to the first halves of sums, with the experts of their tokens."""
    engine = from_options(
        EngineOptions(
            model_path=path,
            model_id="mixture",
            slots=64,
            max_waiting=4096,
            context_length=CONTEXT,
            device=Device.CPU,
            dtype=dtype,
            weights=weights,
        )
    )
    await engine.start()
    tokenizer = char_tokenizer()
    questions = [text.partition("=")[0] + "=" for text in sums(2**30, prompts)]
    asked = [
        ChatCompletionRequest(
            prompt_token_ids=tokenizer(question)["input_ids"],
            n=SAMPLES,
            max_tokens=TOKENS,
            seed=number,
            ignore_eos=True,
            return_token_ids=True,
            return_routed_experts=True,
        )
        for number, question in enumerate(questions)
    ]
    answers = await asyncio.gather(*map(engine.complete, asked))
    await engine.close()
    return answers


def rollouts_of(answers: list[ChatCompletion]) -> list[Rollout]:
    """What an actor makes of them."""
    problem = Problem(problem_id="sum", domain="sums", messages=(), ground_truth="")
    order = PromptOrder(
        order_id="sums",
        index=0,
        purpose=Purpose.TRAINING,
        problem=problem,
        sampling=Sampling(num_samples=SAMPLES),
        seed=0,
    )
    verdict = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    return [
        made.rollout
        for answer in answers
        for made in made_rollouts(
            order, [Answer(answer, choice, verdict) for choice in answer.choices], replay=RoutingReplay.ROLLOUT
        )
    ]


def routed_apart(path: Path, batch: MicroBatch) -> float:
    """Share of (token, layer) for which the model in fp32 chooses another set of experts than the batch tells."""
    model = load_model(path)
    shape = shape_of(model)
    assert shape is not None and batch.routed_experts is not None, "it is a mixture"
    log, differ, count = TorchRouteLog(model, shape), 0, 0
    log.is_on = True
    for segment in range(batch.num_segments):
        its = np.flatnonzero(batch.segment_ids == segment)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(batch.token_ids[its].astype(np.int64))[None], use_cache=False)
        own, told = np.sort(log.take()[:-1]), np.sort(batch.routed_experts[its][1:])
        differ, count = differ + int((own != told).any(axis=-1).sum()), count + own.shape[0] * own.shape[1]
    return differ / count


def arms_of(path: Path, dtype: WeightDType, weights: WeightFormat, *, prompts: int) -> Iterator[Arm]:
    """The same tokens with the trainer's own choice, and with the sampler's."""
    batch = alone(rollouts_of(asyncio.run(sampled(path, dtype, weights, prompts=prompts))))
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))
    apart = routed_apart(path, batch)
    for experts, each in (("chosen by both", with_columns(batch, {"routed_experts": None})), ("replayed", batch)):
        ours = trainer.forward([each])[0][batch.loss_mask]
        theirs: NDArray[np.float32] = batch.behavior_logprobs[batch.loss_mask]
        found, distance = mismatch(ours, theirs), np.abs(ours - theirs)
        yield Arm(
            engine=f"{dtype}" if weights is WeightFormat.NATIVE else str(weights),
            experts=experts,
            tokens=found.num_tokens,
            mean=found.mean,
            p50=found.p50,
            p95=found.p95,
            p99=float(np.quantile(distance, 0.99)),
            max=found.max,
            ess=found.ess,
            routed_apart=apart if experts != "replayed" else 0.0,
        )
    trainer.close()


def run(quick: bool = False) -> list[Arm]:
    """Measure, print, record."""
    torch.set_num_threads(1)
    found: list[Arm] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixture"
        trained_mixture(path, steps=20 if quick else STEPS)
        for dtype, weights in ENGINES[1:2] if quick else ENGINES:
            found += arms_of(path, dtype, weights, prompts=4 if quick else PROMPTS)
    heads = ("engine", "experts", "tokens", "mean", "P50", "P95", "P99", "max", "ESS", "routed apart")
    print("|" + "|".join(heads) + "|\n" + "|---" * len(heads) + "|")
    for arm in found:
        figures = [f"{value:.2g}" for value in (arm.mean, arm.p50, arm.p95, arm.p99, arm.max)]
        cells = [arm.engine, arm.experts, str(arm.tokens), *figures, f"{arm.ess:.4f}", f"{arm.routed_apart:.2%}"]
        print("|" + "|".join(cells) + "|")
    if not quick:
        write_record("routing_replay", {"arms": [asdict(arm) for arm in found]})
    return found
