"""Log-probs of tokens from logits: the definition, in numpy, in the precision of the logits.

log π(token) = z[token] − logsumexp(z), z = logits / temperature, the temperature applied once. `torch_logprobs`
computes the same from hidden states without holding all logits at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def log_softmax(logits: Floats, temperatures: Floats) -> Floats:
    """Log-probs [N, V] of logits [N, V] at temperatures [N]."""
    scaled = logits / temperatures[:, None].astype(logits.dtype)
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def token_logprobs(logits: Floats, token_ids: NDArray[np.integer], temperatures: Floats) -> Floats:
    """Log-probs [N] of `token_ids` [N] under logits [N, V] at temperatures [N]."""
    return np.asarray(log_softmax(logits, temperatures)[np.arange(len(token_ids)), token_ids])
