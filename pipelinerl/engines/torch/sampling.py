"""Sampling of a batch of logits in torch: temperature, top-k, top-p, inverse CDF, and the log-probs of sampled tokens.

A row's token depends only on its logits, parameters and noise. Its log-prob is fp32 and that of the distribution
sampled from, or of the policy before truncation if the row requests it. Rows that keep every token cost nothing extra
if others truncate. A row whose logits contain NaN or +inf, or nothing above -inf, gets a NaN log-prob and an arbitrary
token; the other rows are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.engines.batching.logit_changes import LogitChanges
from pipelinerl.engines.torch.speculation import Drafts

#: Tokens per block of the cumulative distribution; the search finds the block first, then the token in it.
_BLOCK = 1024


class Sample(NamedTuple):
    """Token ids i64 [B] and log-probs f32 [B]; optionally, ids and log-probs [B, K] of the likeliest tokens."""

    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class StartedStep(NamedTuple):
    """A decode step that a device computes; `token_ids` [B] are on the device, where the next step may overwrite them.

    `read` waits for the step and returns its token ids i64 [B] and log-probs f32 [B] on the host.
    """

    token_ids: Tensor
    read: Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise: Tensor,
    min_p: Tensor | None = None,
    policy_logprobs: Tensor | None = None,
    most_top: int = 0,
) -> Sample:
    """Sample a token of each row, with the filters of `plugins.bigram.engine.sample_rows`.

    Args:
        logits: [B, V], any float dtype. The other tensors are on the CPU or on the device of the logits.
        temperature: f32 [B]; 0 is greedy, which reports the whole distribution at temperature 1.
        top_k, top_p, min_p: i64, f32, f32 [B]; 0, 1 and 0 keep every token, as does None for `min_p`.
        noise: f64 [B] in [0, 1).
        policy_logprobs: bool [B], True in rows that report log-probs from before truncation; None means no row does.
        most_top: the number of likeliest tokens to report.
    """
    greedy = temperature == 0
    any_greedy = bool(greedy.any())
    scale = torch.where(greedy, 1.0, temperature) if any_greedy else temperature
    logits = logits.float()
    if not bool((scale == 1).all()):
        logits = logits / scale.to(logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    truncated = (top_k > 0) | (top_p < 1)
    if min_p is not None:
        truncated |= min_p > 0
    truncated &= ~greedy
    if bool(truncated.any()):
        rows = truncated.nonzero()[:, 0]
        on_device = rows.to(logits.device)
        logprobs[on_device] = _truncate(
            logprobs[on_device],
            top_k[rows].to(logits.device),
            top_p[rows].to(logits.device),
            None if min_p is None else min_p[rows].to(logits.device),
            None if policy_logprobs is None else policy_logprobs[rows].to(logits.device),
        )
    drawn = _draw(logprobs, noise.to(logits.device), greedy.to(logits.device) if any_greedy else None)
    if not most_top:
        return drawn
    top, top_ids = logprobs.topk(min(most_top, logprobs.shape[1]), dim=-1)
    return Sample(drawn.token_ids, drawn.logprobs, top_ids, top)


def sample_whole(logits: Tensor, *, temperature: Tensor, noise: Tensor) -> Sample:
    """Sample as `sample` does without truncation; all tensors are on one device, which the host never waits for."""
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature).float()
    return _draw(torch.log_softmax(logits.float() / scale[:, None], dim=-1), noise, greedy)


def _draw(logprobs: Tensor, noise: Tensor, greedy: Tensor | None) -> Sample:
    # In a row with a NaN the search ends beyond the last token.
    token_ids = _inverse_cdf(logprobs, noise).clamp_max_(logprobs.shape[1] - 1)
    if greedy is not None:
        token_ids = torch.where(greedy, logprobs.argmax(dim=-1), token_ids)
    return Sample(token_ids, logprobs.gather(1, token_ids[:, None])[:, 0])


def add_to_logits(logits: Tensor, changes: LogitChanges, drafts: Drafts | None = None) -> Tensor:
    """Return logits f32 [B, V] plus each row's changes, or with `drafts` those of each token that is fed."""
    found = changes.of(range(len(logits))) if drafts is None else changes.of(drafts.rows.tolist(), drafts.drafted())
    rows, token_ids, values = (torch.from_numpy(part).to(logits.device) for part in found)
    return logits.float().index_put((rows, token_ids), values, accumulate=True)


def _truncate(
    logprobs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None, policy_logprobs: Tensor | None
) -> Tensor:
    """Apply top-k, min-p and top-p to log-probs [R, V], and renormalise rows without `policy_logprobs`.

    Dropped tokens get -inf; among equally likely tokens, those with the lower ids are kept.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    if min_p is not None:
        kept &= ordered >= ordered[:, :1] + min_p.log()[:, None]
    mass = torch.where(kept, ordered.double().exp(), 0.0)
    before = mass.cumsum(dim=-1) - mass
    # A top-p of 1 keeps all tokens, even if rounding lets the mass before the last tokens reach 1.
    kept &= (before < top_p.double()[:, None] * mass.sum(dim=-1, keepdim=True)) | (top_p >= 1)[:, None]
    ordered = ordered.masked_fill(~kept, -torch.inf)
    log_mass = ordered.logsumexp(dim=-1, keepdim=True)
    if policy_logprobs is not None:
        # A row whose mass is not finite gets NaN in either case.
        log_mass = log_mass.masked_fill(policy_logprobs[:, None] & log_mass.isfinite(), 0.0)
    ordered = ordered - log_mass
    return torch.empty_like(logprobs).scatter_(1, order, ordered)


def _inverse_cdf(logprobs: Tensor, noise: Tensor) -> Tensor:
    """Return each row's first token whose cumulative probability (fp64) exceeds `noise` times the total. In a row with
    a NaN, the index may be beyond the vocabulary.
    """
    probs = logprobs.exp()
    batch, vocab = probs.shape
    if vocab <= _BLOCK:
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]
    probs = torch.nn.functional.pad(probs, (0, -vocab % _BLOCK)).view(batch, -1, _BLOCK)
    ends = probs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = noise[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_max_(ends.shape[1] - 1)
    rest = target - torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inner = probs.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    # The two sums may round differently at a block's end, so stay within the tokens of non-zero probability.
    within = torch.searchsorted(inner, torch.minimum(rest, inner[:, -1:].nextafter(inner.new_zeros(1))), right=True)
    return (block * _BLOCK + within)[:, 0]
