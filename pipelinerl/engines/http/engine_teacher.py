"""`EngineTeacher`: gets a teacher's log-probs of given tokens from an engine, instead of a model in the trainer.

| waits for | unblocked by |
|---|---|
| the log-probs of a segment | the engine's answer, or the deadline of all attempts |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, final

import numpy as np

from inference_contract.errors import ContractError, Overloaded
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import EngineUnreachable
from trainer_contract.types import Float32, MicroBatch

#: Environment variable for the bearer token of teacher engines.
TEACHER_TOKEN: Final = "PIPELINERL_TEACHER_TOKEN"
#: The maximum number of requests in flight.
_AT_ONCE: Final = 64
_RETRY_S: Final = 1.0


@final
class EngineTeacher:
    """A frozen teacher, served by an engine at a URL. `timeout_s` limits all attempts to score one segment."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._client = EngineClient(token=token, chat_timeout_s=timeout_s)

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch's tokens, 0 at segment starts; raise `EngineUnreachable`."""
        return self._runner.run(self._forward(micro_batches))

    def close(self) -> None:
        """Close the connections."""
        # Use a new thread, because the caller's thread may already run an event loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._closed).result()

    def _closed(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    async def _forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        columns = [np.zeros(batch.num_tokens, np.float32) for batch in micro_batches]
        free = asyncio.Semaphore(_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as segments:
                for batch, column in zip(micro_batches, columns, strict=True):
                    starts = [*np.flatnonzero(batch.position_ids == 0).tolist(), batch.num_tokens]
                    for start, end in pairwise(starts):
                        segments.create_task(self._fill(column, batch, start, end, free))
        # Do not use `except*` here: before Python 3.11.4, it wraps the errors raised inside it in a group.
        except ExceptionGroup as several:
            unreachable, others = several.split(EngineUnreachable)
            if unreachable is None or others is not None:
                raise
            raise unreachable.exceptions[0] from None
        return columns

    async def _fill(self, column: Float32, batch: MicroBatch, start: int, end: int, free: asyncio.Semaphore) -> None:
        request = ChatCompletionRequest(
            prompt_token_ids=batch.token_ids[start:end].tolist(),
            temperature=float(batch.temperatures[start]),
            max_tokens=1,
            return_prompt_logprobs=True,
        )
        async with free:
            logprobs = await self._logprobs(request)
        if len(logprobs) != end - start:
            raise EngineUnreachable(f"{self.url} must give {end - start} prompt_logprobs, got {len(logprobs)}")
        column[start:end] = logprobs

    async def _logprobs(self, request: ChatCompletionRequest) -> list[float]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return (await self._client.chat(self.url, request)).prompt_logprobs or []
            except (ContractError, EngineUnreachable) as error:
                busy = isinstance(error, EngineUnreachable | Overloaded) or error.status >= 500
                if not busy or time.monotonic() + _RETRY_S > deadline:
                    raise EngineUnreachable(f"the teacher {self.url} gives no log-probs: {error}") from error
                await asyncio.sleep(_RETRY_S)
