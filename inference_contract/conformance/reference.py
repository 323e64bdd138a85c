"""`Reference`, transformers' model of a directory: what an engine with these weights must report.

Two float32 implementations of one model differ by rounding. A coarser engine differs by more, so the allowed difference
is measured: the reference also computes in the engine's precision, and the engine may differ from float32 by
`MARGIN` times as much.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_contract.schemas import ChatCompletion
from inference_contract.weights import WeightLayout

Weights = dict[str, Tensor]

#: The precisions in which an engine may compute.
PRECISIONS: Final = ("float32", "bfloat16", "float16", "int8", "int4")
#: The most that an engine may differ, as a multiple of the reference's own difference between the two precisions.
MARGIN: Final = 2.0
#: The typical and the worst difference, in nats, that float32 implementations of one model may have.
FLOAT32: Final = (1e-5, 2e-4)
#: The share of tokens, those with the largest differences, that `typical` leaves out: a mixture of experts may choose
#: the other of two nearly equal experts, which changes single tokens by nats.
_LEFT_OUT: Final = 0.1
#: Shares of the probability: tokens that are less likely than those which hold a share are counted.
TAILS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
_LEVELS: Final = {"int8": 127, "int4": 7}


def unpacked(data: Tensor, layout: WeightLayout) -> Weights:
    """Return copies of the parameters that lie back to back in `data` u8 [layout.num_bytes], by name."""
    rows = zip(layout.parameters, layout.ends, strict=True)
    return {
        spec.name: data[end - spec.num_bytes : end].clone().view(getattr(torch, spec.dtype.value)).view(spec.shape)
        for spec, end in rows
    }


def packed(weights: Mapping[str, Tensor], layout: WeightLayout) -> Tensor:
    """Return the bytes u8 [layout.num_bytes] of the parameters, converted to the layout's dtypes."""
    parts = [weights[spec.name].to(getattr(torch, spec.dtype.value)) for spec in layout.parameters]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def perturbed(weights: Weights, tag: int, *, strength: float = 0.5, names: frozenset[str] | None = None) -> Weights:
    """Return weights of which each (or each of `names`) has noise of `strength` times its own root mean square."""
    changed = dict(weights)
    for row, (name, values) in enumerate(weights.items()):
        if names is None or name in names:
            scale = float(values.double().square().mean().sqrt()) or 0.02
            # Fixed noise without structure, of mean 0 and variance 1.
            spread = torch.sin(torch.arange(values.numel(), dtype=torch.float64) * 12.9898 + tag + 7 * row) * 43758.5453
            noise = ((spread - spread.floor() - 0.5) * 12**0.5).view(values.shape)
            changed[name] = (values.double() + strength * scale * noise).to(values.dtype)
    return changed


@dataclass(frozen=True, slots=True)
class Rows:
    """An engine's answers to one request: `prompt`, `tokens` i64 [n, T], `logprobs` f64 [n, T], at `temperature`."""

    prompt: list[int]
    tokens: Tensor
    logprobs: Tensor
    temperature: float

    @classmethod
    def of(cls, answer: ChatCompletion, temperature: float) -> Rows:
        """Return the choices of an answer to a request with `ignore_eos`, so that all have equally many tokens."""
        tokens = torch.tensor([choice.token_ids for choice in answer.choices])
        logprobs = torch.tensor([choice.token_logprobs for choice in answer.choices], dtype=torch.float64)
        assert tokens.shape == logprobs.shape, "with return_token_ids each token must have a log-prob"
        return cls(answer.prompt_token_ids or [], tokens, logprobs, temperature)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of engine and reference over some tokens, in nats, with the allowed values."""

    typical: float
    worst: float
    tokens: int
    allowed: tuple[float, float]

    @property
    def is_allowed(self) -> bool:
        return self.typical <= self.allowed[0] and self.worst <= self.allowed[1]

    def __str__(self) -> str:
        return (
            f"log-probs of {self.tokens} tokens differ from the reference's by {self.typical:.2g} nats (mean without "
            f"the worst tenth; allowed {self.allowed[0]:.2g}), at most {self.worst:.2g} (allowed {self.allowed[1]:.2g})"
        )


def typical(differences: Tensor) -> float:
    """Return the mean absolute difference without the largest tenth. NaN counts as infinite."""
    ordered = differences.abs().nan_to_num(torch.inf).flatten().sort().values
    return float(ordered[: max(1, int(len(ordered) * (1 - _LEFT_OUT)))].mean())


class Reference:
    """transformers' model and tokenizer of `directory`, in float32 and `precision`; `ValueError` if it cannot load."""

    def __init__(self, directory: Path, precision: str = "float32") -> None:
        self.precision = precision
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{directory} must be a model directory that transformers can load: {error}") from error
        self._coarse: dict[str, Any] = {}  # copies of the model by precision, until other weights are taken
        self.parameters = dict(self.model.named_parameters())
        ties = {id(values): name for name, values in self.parameters.items()}
        everywhere = self.model.named_parameters(remove_duplicate=False)
        #: The names of tied parameters, with the name under which updates carry them.
        self.tied = {name: ties[id(values)] for name, values in everywhere if name not in self.parameters}
        #: Buffers that the model's file holds, or that are computed at its construction.
        self.buffers = [name for name, _ in self.model.named_buffers()]
        self.vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.directory = {name: values.detach().clone() for name, values in self.parameters.items()}
        self.has_experts = any("expert" in name for name in self.parameters)

    def rendered(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation. Raises `ValueError` if the directory has no template for it."""
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (ValueError, TypeError, TemplateError) as error:
            raise ValueError(str(error)) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def first_other(self, expected: list[int], got: list[int]) -> str:
        different = (i for i, (one, two) in enumerate(zip(expected, got, strict=False)) if one != two)
        at = next(different, min(len(expected), len(got)))
        one, two = (
            f"{ids[at]} ({self.tokenizer.decode([ids[at]])!r})" if at < len(ids) else "the end of the prompt"
            for ids in (expected, got)
        )
        return f"token {at} must be {one}, got {two}"

    def take(self, weights: Mapping[str, Tensor]) -> None:
        self._coarse.clear()
        with torch.no_grad():
            for name, values in weights.items():
                self.parameters[name].copy_(values)

    def logprobs(self, rows: Rows, *, precision: str = "float32", shift: int = 0) -> Tensor:
        """Return f64 [n, T]: the log-prob of each token of `rows`. `shift` is added to the positions."""
        logits = self._logits(self.model if precision == "float32" else self._rounded(precision), rows, shift)
        scaled = torch.log_softmax(logits.double() / (rows.temperature or 1.0), -1)
        return scaled.gather(2, rows.tokens[:, :, None])[:, :, 0]

    def _logits(self, model: Any, rows: Rows, shift: int = 0) -> Tensor:
        n, length = rows.tokens.shape
        ids = torch.cat([torch.tensor(rows.prompt).expand(n, -1), rows.tokens], 1)
        positions = torch.arange(shift, shift + ids.shape[1])[None] if shift else None
        with torch.no_grad():
            out: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return out[:, -1 - length : -1].float()

    def difference(self, rows: list[Rows], expected: list[Tensor] | None = None) -> Difference:
        """Compare the engine's log-probs with those of the weights that the reference has taken, or with `expected`."""
        ours = [self.logprobs(each) for each in rows]
        pairs = zip(rows, expected or ours, strict=True)
        residual = torch.cat([(each.logprobs - own).flatten() for each, own in pairs])
        allowed = FLOAT32 if not self.has_experts else (FLOAT32[0], torch.inf)
        if self.precision != "float32":
            pairs = zip(rows, ours, strict=True)
            coarse = [(self.logprobs(each, precision=self.precision) - own).flatten() for each, own in pairs]
            allowed = (FLOAT32[0] + MARGIN * typical(torch.cat(coarse)), torch.inf)
        worst = float(residual.abs().nan_to_num(torch.inf).max())
        return Difference(typical(residual), worst, residual.numel(), allowed)

    def _rounded(self, precision: str) -> Any:
        if precision in self._coarse:
            return self._coarse[precision]
        model = self._coarse[precision] = copy.deepcopy(self.model)
        if precision not in _LEVELS:
            return model.to(getattr(torch, precision))
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.data = _quantised(module.weight.data, _LEVELS[precision])
                module.register_forward_pre_hook(lambda _, given: (_quantised(given[0], _LEVELS["int8"]),))
        return model

    def surprises(self, rows: Rows) -> Tensor:
        """Return f64 [2, 1 + len(TAILS)]: how far the sampled tokens are from their expectation, and its variance.

        First −log p, whose expectation is the entropy; then the numbers of tokens outside the likeliest that hold a
        probability of `TAILS`. Samples of a truncated, colder or penalised distribution fall short of both.
        """
        chances, order = torch.softmax(self._logits(self.model, rows).double() / rows.temperature, -1).sort(
            descending=True
        )
        surprise = -chances.clamp_min(1e-300).log()
        before = chances.cumsum(-1) - chances
        drawn = (order == rows.tokens[:, :, None]).double()
        values = torch.stack([surprise, *((before >= tail).double() for tail in TAILS)])
        mean = (values * chances).sum(-1)
        variance = (values.square() * chances).sum(-1) - mean.square()
        return torch.stack([((values * drawn).sum(-1) - mean).sum((1, 2)), variance.clamp_min(0).sum((1, 2))])

    def lost_by_greed(self, rows: Rows) -> float:
        """Return by how many nats a token is at most less likely than the likeliest."""
        scaled = torch.log_softmax(self._logits(self.model, rows), -1)
        return float((scaled.max(-1).values - scaled.gather(2, rows.tokens[:, :, None])[:, :, 0]).max())

    def across_update(self, rows: Rows, ends: list[int], before: Weights, after: Weights) -> tuple[Tensor, Tensor]:
        """Return two f64 [n, T]: log-probs of rows of which the weights `before` sampled the first `ends[i]` tokens.

        For the first result the weights `after` continue over the keys and values that `before` has written, for the
        second they compute the whole row again.
        """
        ids = torch.cat([torch.tensor(rows.prompt).expand(len(ends), -1), rows.tokens], 1)
        # The first new token is sampled from the output at the token before it, which the new weights compute.
        starts = [max(len(rows.prompt) + end - 1, 1) for end in ends]
        with torch.no_grad():
            self.take(before)
            kept = self.logprobs(rows)
            caches = [
                self.model(input_ids=row[None, :start], use_cache=True).past_key_values
                for row, start in zip(ids, starts, strict=True)
            ]
            self.take(after)
            recomputed, whole = kept.clone(), self.logprobs(rows)
            for number, (end, start, cache) in enumerate(zip(ends, starts, caches, strict=True)):
                if end < rows.tokens.shape[1]:
                    rest = ids[number : number + 1, start:]
                    logits = self.model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0, :-1]
                    scaled = torch.log_softmax(logits.double() / (rows.temperature or 1.0), -1)
                    kept[number, end:] = scaled.gather(1, rows.tokens[number, end:, None])[:, 0]
                    recomputed[number, end:] = whole[number, end:]
        return kept, recomputed


def _quantised(values: Tensor, levels: int) -> Tensor:
    step = (values.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-30)
    return (values / step).round() * step
