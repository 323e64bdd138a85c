"""Log-probs of tokens from hidden states, in torch: fp32 softmax, without ever holding all logits of a big vocabulary.

Agrees with the definition in `logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Logits held at once: 64 MiB in fp32. A batch that fits is computed in one piece, without recomputation.
LOGITS_AT_ONCE: Final = 2**24


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperatures: Tensor | None,
    *,
    vocab_size: int,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """Log-probs f32 [N] of the tokens that the hidden states predict.

    Beyond `logits_at_once` logits the work is done in pieces whose logits are computed again in the backward pass.

    Args:
        hidden: [N, d], at the positions before the tokens.
        head: from hidden states [n, d] to logits [n, V].
        token_ids: i64 [N].
        temperatures: f32 [N]; None stands for 1 everywhere.
        vocab_size: V.
    """
    rows = max(1, logits_at_once // vocab_size)
    if hidden.shape[0] <= rows:
        return _piece(hidden, head, token_ids, temperatures)
    pieces = []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        arguments = (hidden[part], head, token_ids[part], None if temperatures is None else temperatures[part])
        pieces.append(checkpoint(_piece, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces)


def _piece(hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor, temperatures: Tensor | None) -> Tensor:
    logits = head(hidden).float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return -torch.nn.functional.cross_entropy(logits, token_ids, reduction="none")
