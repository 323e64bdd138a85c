"""`EngineTeacher`: gets a teacher's log-probs of given tokens from an engine, instead of a model in the trainer.

| waits for | unblocked by |
|---|---|
| the log-probs of a segment | the engine's answer, or the deadline of all attempts |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
from pydantic import ValidationError

from inference_contract import routes
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, ChatMessage
from pipelinerl.errors import EngineUnreachable
from pipelinerl.system.outside import OutsideClient, ResponseRejected
from trainer_contract.types import Float32, MicroBatch

#: Environment variable for the bearer token of teacher engines.
TEACHER_TOKEN: Final = "PIPELINERL_TEACHER_TOKEN"
#: The maximum number of requests in flight.
_AT_ONCE: Final = 64
_OK: Final = 200
#: Range of log-probs: rounding may lift one above 0 by a little, and none is below that of a 16-bit logit's range.
_MOST_LOGPROB: Final = 1e-3
_LEAST_LOGPROB: Final = -1e6


class EngineTeacher:
    """A frozen teacher, served by an engine at a URL. `timeout_s` limits all attempts to score one segment."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._client = OutsideClient(token=token)

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch's tokens, 0 at segment starts; raise `EngineUnreachable`."""
        return self._runner.run(self._forward(micro_batches))

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of the prompt that the engine makes of a user's message; raise `EngineUnreachable`."""
        messages = [ChatMessage(role="user", content=text)]
        body = _body(ChatCompletionRequest(messages=messages, max_tokens=1, return_token_ids=True))
        return self._parsed(self._runner.run(self._answered(body))).prompt_token_ids or []

    def close(self) -> None:
        # Use a new thread, because the caller's thread may already run an event loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: self._runner.run(self._client.close())).result()
            thread.submit(self._runner.close).result()

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
            logprobs = self._parsed(await self._answered(_body(request))).prompt_logprobs or []
        if len(logprobs) != end - start:
            raise EngineUnreachable(
                f"the teacher {self.url} must give {end - start} prompt_logprobs, got {len(logprobs)}"
            )
        values = np.array(logprobs, np.float64)
        wrong = ~((values >= _LEAST_LOGPROB) & (values <= _MOST_LOGPROB))
        if wrong.any():
            place = int(wrong.argmax())
            raise EngineUnreachable(
                f"the teacher {self.url} must give finite log-probs of at most 0, got {values[place]} for token {place}"
            )
        column[start:end] = values

    async def _answered(self, body: bytes) -> bytes:
        """Return the engine's response to a request, with retries; raise `EngineUnreachable` if it sends none."""
        try:
            response = await self._client.post_until(
                self.url + routes.CHAT_COMPLETIONS, body, timeout_s=self._timeout_s
            )
        except TimeoutError as error:
            reason = f"{error}; is the engine running?"
        except ResponseRejected as error:
            reason = str(error)
        else:
            if response.status == _OK:
                return response.content
            reason = f"HTTP {response.status}: {response.quoted()}"
        raise EngineUnreachable(f"the teacher {self.url} gives no log-probs: {reason}")

    def _parsed(self, content: bytes) -> ChatCompletion:
        try:
            return ChatCompletion.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise EngineUnreachable(
                f"the teacher {self.url} must answer with a ChatCompletion; {where}: {first['msg']}"
            ) from None


def _body(request: ChatCompletionRequest) -> bytes:
    return request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
