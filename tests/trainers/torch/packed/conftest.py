"""Micro-batches of rollouts with shared prefixes."""

from dataclasses import replace

import numpy as np
import pytest

#: Rollout lengths: answers to two prompts of 6 and 9 tokens, an answer to a third prompt, and a prompt alone.
LENGTHS = (12, 30, 9, 10, 12, 7, 40, 5, 16)
PROMPTS = (6, 6, 6, 9, 6, 6, 9, 5, 4)


@pytest.fixture
def shared(micro_batch):
    """Return a micro-batch in which prompts of equal length are equal, and all tokens after a prompt are sampled."""
    batch = micro_batch(LENGTHS)
    tokens, mask = batch.token_ids.copy(), np.zeros(batch.num_tokens, dtype=bool)
    for segment, prompt in enumerate(PROMPTS):
        (where,) = np.nonzero(batch.segment_ids == segment)
        tokens[where[:prompt]] = 3 + np.arange(prompt) * (prompt + 1) % 40
        mask[where[prompt:]] = True
    return replace(batch, token_ids=tokens, loss_mask=mask)


@pytest.fixture
def branching(micro_batch):
    """Return rollouts with a shared system prompt, two prompts after it, and answers that diverge at various tokens."""
    common, prompts = [3, 4, 5, 6], ([7, 8, 9], [7, 8, 10, 11])
    answers = ([20, 21, 22], [20, 21, 23, 24], [20, 21, 22], [25], [20, 21])
    texts = [(common + prompt, answer) for prompt in prompts for answer in answers]
    batch = micro_batch([len(prompt) + len(answer) for prompt, answer in texts])
    return replace(
        batch,
        token_ids=np.concatenate([prompt + answer for prompt, answer in texts]).astype(np.int32),
        loss_mask=np.concatenate([[False] * len(prompt) + [True] * len(answer) for prompt, answer in texts]),
    )
