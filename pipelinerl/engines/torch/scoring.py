"""Log-probs of given tokens: one forward of the model's own modules over a whole prompt, without the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

#: Number of positions whose log-probs are computed at a time, in fp32 [positions, vocabulary].
_AT_ONCE: Final = 256


@final
class PromptScorer:
    """Computes the log-probs of prompts with the weights that the model's modules hold now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Return each token's log-prob given the tokens before it, 0 for the first; needs memory for logits [P, V]."""
        if len(token_ids) < 2:
            return [0.0] * len(token_ids)
        tokens = torch.tensor(token_ids, device=self._device)
        # Without a plan, `attention.attend` is causal over the prompt and uses no cache.
        output: Any = self._model(
            input_ids=tokens[None, :-1],
            position_ids=torch.arange(len(tokens) - 1, device=self._device)[None],
            use_cache=False,
            plan=None,
        )
        parts = zip(output.logits[0].split(_AT_ONCE), tokens[1:].split(_AT_ONCE), strict=True)
        return [0.0, *(number for logits, targets in parts for number in _of(logits, targets, temperature))]


def _of(logits: Tensor, targets: Tensor, temperature: float) -> list[float]:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, targets[:, None])
    return logprobs[:, 0].tolist()
