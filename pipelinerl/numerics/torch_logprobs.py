"""Log-probs of tokens from hidden states, in torch: fp32 softmax, with logits held in pieces.

The results, including measures of the whole distribution, agree with the definition in `logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer_contract.types import HeadMeasure

#: Number of logits held at once: 64 MiB in fp32. A batch that fits is computed in one piece, without recomputation.
LOGITS_AT_ONCE: Final = 2**24


def token_predictions(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperatures: Tensor | None,
    *,
    vocab_size: int,
    measures: tuple[HeadMeasure, ...] = (),
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """Return f32 [1 + M, N]: log-probs of the tokens that the hidden states predict, and M measures.

    With more than `logits_at_once` logits the work is done in pieces, and backward recomputes the logits.

    Args:
        hidden: [N, d], at the positions before the tokens.
        head: from hidden states [n, d] to logits [n, V].
        token_ids: i64 [N].
        temperatures: f32 [N]; None stands for 1 everywhere.
        vocab_size: V.
        measures: measures of the distributions to compute.
    """
    rows = max(1, logits_at_once // vocab_size)
    if hidden.shape[0] <= rows:
        return _piece(hidden, head, token_ids, temperatures, measures)
    pieces = []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        tempered = None if temperatures is None else temperatures[part]
        arguments = (hidden[part], head, token_ids[part], tempered, measures)
        pieces.append(checkpoint(_piece, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces, dim=1)


def _piece(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperatures: Tensor | None,
    measures: tuple[HeadMeasure, ...],
) -> Tensor:
    logits = head(hidden).float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = -torch.nn.functional.cross_entropy(logits, token_ids, reduction="none")
    if not measures:
        return logprobs[None]
    normaliser = torch.logsumexp(logits, dim=-1)
    return torch.stack([logprobs, *(_measured(measure, logits, normaliser) for measure in measures)])


def _measured(measure: HeadMeasure, logits: Tensor, normaliser: Tensor) -> Tensor:
    if measure is HeadMeasure.MEAN_LOGPROB:
        return logits.mean(dim=-1) - normaliser
    logprobs = logits - normaliser[:, None]  # first: normaliser − Σ π·logits would cancel
    return -(logprobs.exp() * logprobs).sum(dim=-1)
