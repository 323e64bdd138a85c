"""Reference definition of log-probs of tokens from logits, in numpy, in the precision of the logits.

log π(token) = z[token] − logsumexp(z), with z = logits / temperature. `torch_logprobs` and `jax_logprobs` compute the
same from hidden states, without holding all logits at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_contract.types import HeadMeasure

Floats = NDArray[np.floating[Any]]


def log_softmax(logits: Floats, temperatures: Floats) -> Floats:
    """Return log-probs [N, V] of logits [N, V] at temperatures [N]."""
    scaled = logits / temperatures[:, None].astype(logits.dtype)
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def token_logprobs(logits: Floats, token_ids: NDArray[np.integer], temperatures: Floats) -> Floats:
    """Return log-probs [N] of `token_ids` [N] under logits [N, V] at temperatures [N]."""
    return np.asarray(log_softmax(logits, temperatures)[np.arange(len(token_ids)), token_ids])


def measured(measure: HeadMeasure, logprobs: Floats) -> Floats:
    """Return the value of `measure`, such as the entropy, [N], for distributions with log-probs [N, V]."""
    if measure is HeadMeasure.MEAN_LOGPROB:
        return np.asarray(logprobs.mean(axis=-1))
    return np.asarray(-(np.exp(logprobs) * logprobs).sum(axis=-1))


def measure_slopes(measure: HeadMeasure, logprobs: Floats) -> Floats:
    """Return d measure / dz [N, V], z = logits / temperature: 1/V − π (mean log-prob), −π(log π + H) (entropy)."""
    probabilities = np.exp(logprobs)
    if measure is HeadMeasure.MEAN_LOGPROB:
        return np.asarray(1.0 / logprobs.shape[-1] - probabilities)
    return np.asarray(-probabilities * (logprobs + measured(measure, logprobs)[:, None]))
