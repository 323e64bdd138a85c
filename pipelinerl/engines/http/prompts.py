"""`PromptCheck`: engines must render conversations as the run's own model directory does.

An engine with another tokenizer, chat template or default system prompt answers other questions than those of the data,
and no log-prob shows it, because the trainer computes with the engine's tokens. So the first answers of each engine are
compared until one is right, and later one in `_EVERY`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Final

from inference_contract.errors import InvalidRequest
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer

log = logging.getLogger("pipelinerl")

_EVERY: Final = 64


class PromptCheck:
    """Compares prompts that engines report with the renderings of the directory `model`."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._answers: Counter[str] = Counter()  # of each engine, since it last rendered a prompt wrongly
        self._turn = asyncio.Lock()
        self._day = time.strftime("%F")  # in which a difference is a fault

    async def __call__(self, url: str, request: ChatCompletionRequest, prompt: list[int]) -> None:
        """Raise `InvalidRequest` if the engine at `url` has made another prompt of the request than the directory."""
        if request.prompt_token_ids:
            return
        async with self._turn:
            is_due = not self._answers[url] % _EVERY
            difference = await asyncio.to_thread(self._difference, request, prompt) if is_due else None
            if difference is None:
                self._answers[url] += 1
            elif self._day != (today := time.strftime("%F")):
                # A template may state the date, which has changed since the engine rendered the prompt.
                self._day, difference = today, None
            else:
                self._answers[url] = 0
        if difference is not None:
            raise InvalidRequest(
                f"the engine at {url} renders prompts otherwise than {self._model}: {difference}; serve the tokenizer "
                "and chat template of that directory, without a system prompt of the server's own",
                param="messages",
            )

    @cached_property
    def _tokenizer(self) -> ChatTokenizer | None:
        try:
            return ChatTokenizer.load(self._model)
        except ModelError as error:
            log.warning("%s; the prompts of engines cannot be compared with it", error)
            return None

    def _difference(self, request: ChatCompletionRequest, prompt: list[int]) -> str | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        try:
            expected = tokenizer.encode_request(request)
        except ModelError as error:
            return str(error)
        if expected == prompt:
            return None
        pairs = enumerate(zip(expected, prompt, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(prompt)))
        one, other = (
            f"{ids[at]} ({tokenizer.decode(ids[at : at + 1])!r})" if at < len(ids) else "its end"
            for ids in (expected, prompt)
        )
        return f"token {at} must be {one}, got {other}"
