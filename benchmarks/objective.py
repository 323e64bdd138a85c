"""Compare GRPO's loss and gradient from an objective's five terms (slots) with one torch expression.

Both arms compute the loss −J and its gradient d(−J)/d log π from the same fp32 tensors: micro-batches of rollouts with
prompts, packed as the trainer packs them. The reference, `minimum`, writes PPO's min as one expression on prepared
weights and masks; unlike the slots, it requires that the log-probs of prompt tokens are finite. The gradients of both
arms must agree before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, paired, report, seconds_of
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator

SIZES: Final = (8192, 65536)
TARGET: Final = 1.2
EPSILON: Final = 0.2
#: Numbers of prompt tokens and of sampled tokens in each rollout.
PROMPT: Final = 64
SAMPLED: Final = 448


def micro_batch(tokens: int) -> tuple[Tensor, dict[str, Any]]:
    """Return log-probs and per-token inputs for `tokens` tokens, as a trainer passes them to an objective."""
    draw = generator(0, "objective", tokens)
    rollouts = tokens // (PROMPT + SAMPLED)
    mask = np.tile(np.arange(PROMPT + SAMPLED) >= PROMPT, rollouts)
    behavior = -draw.exponential(1.0, tokens)
    columns: dict[str, Any] = {
        "loss_mask": mask,
        "segment_ids": np.repeat(np.arange(rollouts, dtype=np.int32), PROMPT + SAMPLED),
        "advantages": (np.repeat(draw.normal(size=rollouts), PROMPT + SAMPLED) * mask).astype(np.float32),
        "weights": (mask / (rollouts * SAMPLED)).astype(np.float32),
        "behavior_logprobs": (behavior * mask).astype(np.float32),
    }
    logprobs = (behavior + draw.normal(0, 0.15, tokens)).astype(np.float32)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return torch.from_numpy(logprobs), tensors | {"num_segments": rollouts}


def minimum(logprobs: Tensor, behavior: Tensor, weighted: Tensor, mask: Tensor) -> Tensor:
    """Return GRPO's loss as one expression; `weighted` is weight · advantage, `mask` is 0 on prompts (ratio exp(0))."""
    ratio = torch.exp((logprobs - behavior) * mask)
    return -torch.minimum(ratio * weighted, ratio.clamp(1.0 - EPSILON, 1.0 + EPSILON) * weighted).sum()


def arms(tokens: int) -> dict[str, Callable[[], Tensor]]:
    """Map the name of each arm to a function that evaluates the loss and returns its gradient."""
    given, columns = micro_batch(tokens)
    objective = resolve("grpo")
    behavior, mask = columns["behavior_logprobs"], columns["loss_mask"].float()
    weighted = columns["weights"] * columns["advantages"]

    def gradient_of(loss_of: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def work() -> Tensor:
            variable = given.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_of(variable), variable)
            return gradient

        return work

    return {
        "slots": gradient_of(lambda variable: objective.evaluate(variable, columns)),
        "minimum": gradient_of(lambda variable: minimum(variable, behavior, weighted, mask)),
    }


def run(quick: bool = False) -> None:
    """Time both arms at each size, print the table and, unless `quick`, write the record."""
    torch.set_num_threads(1)
    rows, record = [], {}
    for tokens in SIZES:
        works = arms(tokens)
        torch.testing.assert_close(works["slots"](), works["minimum"](), rtol=1e-5, atol=1e-9)
        repeats = 2 * 65536 // tokens
        timed = {name: seconds_of(work, repeats=repeats) for name, work in works.items()}
        timings = paired(timed, rounds=5 if quick else 41, warmup=3)
        ratio = timings.ratio("slots", "minimum")
        rows.append(Row(f"slots / PPO's min, {tokens} tokens", ratio, f"<= {TARGET}", ratio.median <= TARGET))
        rows.append(Row(f"slots, {tokens} tokens [ms]", 1e3 * timings.median("slots") / repeats))
        record[str(tokens)] = {"ratios": {"minimum": ratio.as_dict()}, "repeats": repeats, **timings.as_dict()}
    report("objective", rows, {"target": TARGET, "sizes": record}, quick=quick, title="loss of GRPO and its gradient")
