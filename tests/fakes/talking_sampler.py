"""`TalkingSampler`: a `Sampler` that answers conversations by a script, with real tokens of a real tokenizer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import final

from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    Choice,
    FinishReason,
    Usage,
)
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.types import Answered, Message, Problem, PromptOrder, Purpose, Sampling

#: A function from the messages of a request to the text of the answer.
Script = Callable[[Sequence[ChatMessage]], str]


@cache
def tokenizer():
    made = char_tokenizer()
    return ChatTokenizer(made, {made.eos_token_id})


def order(index=0, *, samples=1, max_tokens=16, truth="b"):
    problem = Problem(problem_id=f"p{index}", domain="talk", messages=(Message("user", "hello"),), ground_truth=truth)
    return PromptOrder(
        order_id=f"prompt-{index:06d}",
        index=index,
        purpose=Purpose.TRAINING,
        problem=problem,
        sampling=Sampling(num_samples=samples, temperature=0.5, max_tokens=max_tokens),
        seed=1000 + index,
    )


@final
class TalkingSampler:
    """Answers by a script; the model version rises by one with each answer. While `gate` is closed, answers wait.

    Text is reported character by character; `between_pieces` is awaited after each.
    """

    def __init__(self, script=lambda messages: "a"):
        self.script = script
        self.requests: list[ChatCompletionRequest] = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.between_pieces: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)

    async def complete(self, request, *, begun=lambda: None, engine="", near="", on_text=None):
        self.requests.append(request)
        version = len(self.requests)
        begun()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer = completion(request, self.script(request.messages or []), version=version)
        content = answer.choices[0].message.content
        for end in range(len(content) if on_text else 0):
            on_text(content[: end + 1])  # type: ignore[misc]
            await self.between_pieces()
        return Answered(answer, "http://a")


def completion(request, text, *, version=0):
    """Return the completion of an engine that answers `text`, cut at the token limit of the request."""
    messages, known = request.messages or [], request.continue_token_ids
    if known and request.continue_from:
        prompt = tokenizer().encode_continuation(messages, request.continue_from, known)
    else:
        prompt = tokenizer().encode_chat(messages)
    (end,) = tokenizer().eos_token_ids
    sampled = [*tokenizer().encode(text), end]
    cut = sampled[: request.token_limit]
    choice = Choice(
        index=0,
        message=AssistantMessage(content=text if cut == sampled else tokenizer().decode(cut)),
        finish_reason=FinishReason.STOP if cut == sampled else FinishReason.LENGTH,
        token_ids=cut,
        token_logprobs=[-0.5] * len(cut),
        version_spans=[(version, len(cut))],
    )
    usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(cut), total_tokens=len(prompt) + len(cut))
    return ChatCompletion(
        id="c",
        created=0,
        model="m",
        choices=[choice],
        usage=usage,
        prompt_token_ids=prompt,
        model_version=version,
        epoch=1,
    )
