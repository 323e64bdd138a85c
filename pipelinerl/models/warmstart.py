"""The supervised warm start: demonstrations teach a tiny decoder a task in part, and RL has to do the rest.

Promises: demonstrations are correct and come from the training split; the result is accepted by its greedy accuracy on
the validation split alone (held-out problems are never seen); the same settings give the same weights on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelinerl.errors import ModelError
from pipelinerl.models.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Problem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """What to fit and when to stop.

    Attributes:
        training_problem, validation_problem: problem i of the training and of the validation split.
        shape: of the decoder; its `vocab` must hold the tokenizer's.
        accuracy: stop at the first check inside [low, high] of greedy validation accuracy; above `high` is a failure,
            since RL would have too little left to do.
        demonstration_temperature: demonstrations are fitted as samples at this temperature, so that at temperature 1
            the model is decisive. At 1 the partly trained model would sample far worse than its greedy answers.
        check_every: optimizer steps between two checks.
    """

    training_problem: Callable[[int], Problem]
    validation_problem: Callable[[int], Problem]
    tokenizer: ChatTokenizer
    shape: DecoderShape
    seed: int = 0
    accuracy: tuple[float, float] = (0.38, 0.44)
    demonstration_temperature: float = 4.0
    learning_rate: float = 1e-3
    lr_warmup_steps: int = 50
    batch_size: int = 64
    max_steps: int = 2000
    check_every: int = 2
    validation_problems: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """One check: greedy accuracy, expected accuracy of samples at temperature 1, mean loss per token in nats."""

    step: int
    greedy_accuracy: float
    sampled_accuracy: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """The model and how it came about; accuracies are on the validation split."""

    model: PreTrainedModel
    steps: int
    demonstrations: int
    greedy_accuracy: float
    sampled_accuracy: float
    seconds: float


def warm_start(
    settings: WarmStartSettings, on_progress: Callable[[WarmStartProgress], None] = lambda _: None
) -> WarmStartReport:
    """Fit demonstrations until the validation accuracy is inside the band.

    Raises:
        ModelError: the band was missed; the message says how, and what to change.
    """
    import torch

    began = time.monotonic()
    model = random_decoder(settings.shape, seed=settings.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checked = _batch([settings.validation_problem(i) for i in range(settings.validation_problems)], settings.tokenizer)
    low, high = settings.accuracy
    best = 0.0
    for step in range(1, settings.max_steps + 1):
        first = (step - 1) * settings.batch_size
        problems = [settings.training_problem(first + i) for i in range(settings.batch_size)]
        loss = _step(model, optimizer, _batch(problems, settings.tokenizer), settings, step)
        if step % settings.check_every:
            continue
        greedy, sampled = accuracies(model, checked)
        on_progress(WarmStartProgress(step=step, greedy_accuracy=greedy, sampled_accuracy=sampled, loss=loss))
        best = max(best, greedy)
        if greedy >= low:
            break
    else:
        raise ModelError(
            f"expected a validation accuracy of {low:g} to {high:g}, got at most {best:.3f} in {settings.max_steps} "
            "steps; try another seed, more steps, or a wider model"
        )
    if greedy > high:
        raise ModelError(
            f"expected a validation accuracy of {low:g} to {high:g}, step {step} jumped to {greedy:.3f}; try another "
            "seed, a lower learning rate, or check more often"
        )
    return WarmStartReport(
        model=model.eval(),
        steps=step,
        demonstrations=step * settings.batch_size,
        greedy_accuracy=greedy,
        sampled_accuracy=sampled,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Prompts with their right answers, padded on the right: i64 [B, L] each; `labels` is −100 outside the answers."""

    token_ids: torch.Tensor
    labels: torch.Tensor


def _batch(problems: Sequence[Problem], tokenizer: ChatTokenizer) -> Demonstrations:
    import torch

    end = min(tokenizer.eos_token_ids)
    rows, labels = [], []
    for problem in problems:
        prompt = tokenizer.encode_chat(problem.messages)
        answer = [*tokenizer.encode(problem.ground_truth), end]
        rows.append(prompt + answer)
        labels.append([_IGNORED] * len(prompt) + answer)
    longest = max(map(len, rows))
    return Demonstrations(
        torch.tensor([row + [end] * (longest - len(row)) for row in rows]),
        torch.tensor([label + [_IGNORED] * (longest - len(label)) for label in labels]),
    )


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Demonstrations,
    settings: WarmStartSettings,
    step: int,
) -> float:
    """One optimizer step; returns the mean loss per answer token."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, step / max(settings.lr_warmup_steps, 1))
    logits = model(input_ids=batch.token_ids).logits[:, :-1] / settings.demonstration_temperature
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=_IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def accuracies(model: PreTrainedModel, batch: Demonstrations) -> tuple[float, float]:
    """Greedy accuracy, and expected accuracy of samples at temperature 1, of exact answers.

    No generation is needed: greedy decoding gives the answer iff every token of it is the likeliest after those before.
    """
    import torch

    with torch.no_grad():
        logprobs = model(input_ids=batch.token_ids).logits[:, :-1].log_softmax(-1)
    labels = batch.labels[:, 1:]
    outside = labels == _IGNORED
    right = (logprobs.argmax(-1) == labels) | outside
    answer = logprobs.gather(2, labels.clamp(min=0)[..., None])[..., 0].masked_fill(outside, 0.0).sum(1)
    return float(right.all(1).float().mean()), float(answer.exp().mean())
