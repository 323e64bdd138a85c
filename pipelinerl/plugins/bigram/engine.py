"""The engine of the numpy bigram model: a complete engine without heavy libraries, exact and deterministic.

Tests of all layers above the engines use it. It runs on the same `BatchingEngine` as the torch engine, so its batching,
version spans, weight updates and HTTP are real. Its sampler follows the contract's definition row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference_contract.engine import Engine
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import NOTHING_FURTHER, EarlyStep, Prefill, RowState, RowTable, top_tokens
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.model import PARAMETER, BigramModel
from trainer_contract.host_weights import bytes_of
from trainer_contract.types import Device, WeightDType


def from_options(options: EngineOptions) -> Engine:
    """Return the engine that a recipe describes. Raises `ModelError` for options or models without support."""
    if options.dtype is not WeightDType.FLOAT32 or options.device not in (Device.AUTO, Device.CPU):
        raise ModelError(f"the bigram engine runs in float32 on the cpu, got {options.dtype} on {options.device}")
    options.refuse("the bigram engine", "weights", "devices", "options", "memory_share")

    def load() -> BigramRunner:
        model = BigramModel.load(options.model_path)
        return BigramRunner(model, rows=options.slots, context_length=options.context_length)

    return BatchingEngine(
        options, load=load, tokenizer=ChatTokenizer.load(options.model_path), endpoints=endpoints_of(options)
    )


class BigramRunner:
    """`ModelRunner` of a bigram model. It has no cache: the next token depends on the current one alone."""

    def __init__(self, model: BigramModel, *, rows: int, context_length: int | None = None) -> None:
        self.slots = rows
        self.context_length = context_length or model.context_length
        self.vocab_size = model.vocab_size
        self.layout = WeightLayout(
            parameters=(ParameterSpec(name=PARAMETER, shape=model.logits.shape, dtype=DType.FLOAT32),)
        )
        self.cache_bytes = 0
        self.route_log = None
        self.scorer = self._prompt_logprobs
        self._current = bytes_of(model.logits).copy()
        self._staged = np.zeros_like(self._current)
        self._states: list[RowState | None] = [None] * rows
        self._rows = RowTable(rows)
        self.early_step = EarlyStep(rows, is_used=False)
        self.top_logprobs: dict[int, TopTokens] = {}
        self.further = NOTHING_FURTHER

    room = None

    def reserve(self, num_rows: int) -> bool:
        """Return True without reserving anything: a bigram model needs no cache."""
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Do nothing: there is no cache."""

    def clear(self, rows: Sequence[int]) -> None:
        """Do nothing: there is no cache."""

    def survives(self, error: Exception) -> bool:
        """Return True: there is no cache."""
        return True

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Do nothing: there is no cache."""

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Do nothing: there is no cache."""

    def place(self, states: Sequence[RowState]) -> None:
        self._rows.place(states)
        for state in states:
            self._states[state.row] = state

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._rows.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._states[target] = self._states[source]

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        used, table = slice(0, num_rows), self._rows
        states = [state for state in self._states[used] if state is not None]
        logits = self._logits()[table.feeds[used]].astype(np.float64)
        if table.any_change:
            rows, changed, values = table.changes.of(range(num_rows))
            logits[rows, changed] += values
        self.top_logprobs = {}
        token_ids, logprobs = sample_rows(logits, states, table.noise(used), self.top_logprobs)
        table.advance(used, np.array(token_ids, dtype=np.int64))
        return token_ids, logprobs

    def staging(self) -> NDArray[np.uint8]:
        return self._staged

    def finish_staging(self) -> None:
        """Do nothing: weights are served as they arrive."""

    def swap(self) -> None:
        self._current, self._staged = self._staged, self._current

    def _prompt_logprobs(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        logits = self._logits()[token_ids[:-1]].astype(np.float64) / temperature
        pairs = zip(logits, token_ids[1:], strict=True)
        return [0.0, *(float(_log_softmax(row)[token]) for row, token in pairs)]

    def _logits(self) -> NDArray[np.float32]:
        return self._current.view(np.float32).reshape(self.vocab_size, self.vocab_size)


def sample_rows(
    logits: NDArray[np.float64],
    states: Sequence[RowState],
    noise: NDArray[np.float64],
    top: dict[int, TopTokens] | None = None,
) -> tuple[list[int], list[float]]:
    """Sample token ids from logits [B, V] and noise [B] in [0, 1); return them with their log-probs.

    Temperature applies first. Then tokens are dropped that are not among the `top_k` likeliest, or are less likely than
    `min_p` times the likeliest. Of the rest, renormalised, the smallest set of likeliest tokens is kept whose
    probabilities sum to at least `top_p`. The log-probs are those of the resulting distribution, or with
    `policy_logprobs` those from before tokens were dropped; greedy rows report the distribution at temperature 1. The
    sampled token is the inverse of the cumulative distribution, evaluated at the row's noise. A row whose logits
    contain NaN or +inf, or nothing above -inf, gets a NaN log-prob. `top` receives the likeliest tokens of the rows
    that report any.
    """
    token_ids, logprobs = [], []
    for row, state in enumerate(states):
        greedy = state.temperature == 0.0
        scaled = logits[row] / (1.0 if greedy else state.temperature)
        if not np.isfinite(scaled.max()):
            token_ids.append(0)
            logprobs.append(math.nan)
            continue
        logp = _log_softmax(scaled)
        if greedy:
            token_id = int(np.argmax(logp))
        else:
            logp = _truncated(logp, state)
            cumulative = np.cumsum(np.exp(logp))
            token_id = int(np.searchsorted(cumulative, noise[row] * cumulative[-1], side="right"))
        token_ids.append(token_id)
        logprobs.append(float(logp[token_id]))
        if top is not None and state.num_top:
            order = np.argsort(-logp, kind="stable")[: state.num_top]
            top[row] = top_tokens(order, logp[order], state.num_top)
    return token_ids, logprobs


def _truncated(logp: NDArray[np.float64], state: RowState) -> NDArray[np.float64]:
    """Return `logp` [V] with -inf for dropped tokens; the others are renormalised, unless for `policy_logprobs`."""
    top_k, top_p, min_p = state.top_k, state.top_p, state.min_p
    if top_k == 0 and top_p >= 1.0 and min_p == 0.0:
        return logp
    order = np.argsort(-logp, kind="stable")
    if top_k:
        order = order[:top_k]
    if min_p:
        order = order[logp[order] >= logp[order[0]] + math.log(min_p)]
    kept = np.exp(logp[order])
    before = np.cumsum(kept) - kept
    order = order[before < top_p * kept.sum()]
    out = np.full_like(logp, -np.inf)
    out[order] = logp[order] if state.policy_logprobs else _log_softmax(logp[order])
    return out


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
