"""Checks of a chat request against the model: the room left after the prompt, and the requested samples.

An admitted request has room for at least one token. A prefix that another engine began must be unfinished: it has no
token that ends a sample, no stop string, and fewer tokens than the limit. Sample i uses the noise of (seed, i),
independent of the other samples in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from inference_contract.errors import ContextExceeded, InvalidRequest, UnknownModel
from inference_contract.schemas import AnswerPrefix, ChatCompletionRequest, ChatMessage
from inference_contract.tools import ToolDefinition
from pipelinerl import rng
from pipelinerl.engines.batching.logit_changes import LogitChange
from pipelinerl.engines.batching.sample_loop import ServedModel
from pipelinerl.engines.batching.sequence import Request, TextWindow

#: An upper bound on a token's average length, in characters; vocabularies have few longer tokens, all spaces or dashes.
_LONGEST_TOKEN: Final = 128


def check_model(chat: ChatCompletionRequest, model_id: str) -> None:
    """Raise `UnknownModel` unless the request names `model_id`, the last part of its path, or no model."""
    if chat.model is None or chat.model == model_id:
        return
    short = model_id.rstrip("/").rpartition("/")[2]
    if chat.model != short:
        also = "" if short == model_id else f", {short!r} in short"
        raise UnknownModel(f"this engine serves {model_id!r}{also}, got {chat.model!r}", param="model")


def logit_change(chat: ChatCompletionRequest, vocab_size: int) -> LogitChange | None:
    """Return the request's change to logits, or None if it changes none.

    Raises:
        InvalidRequest: a token of the bias is outside the vocabulary.
    """
    bias = chat.logit_bias or {}
    if not bias and chat.frequency_penalty == 0 and chat.presence_penalty == 0:
        return None
    if bias and (min(bias) < 0 or max(bias) >= vocab_size):
        wrong = min(bias) if min(bias) < 0 else max(bias)
        raise InvalidRequest(f"logit_bias: token ids must be in [0, {vocab_size}), got {wrong}", param="logit_bias")
    return LogitChange(bias, chat.frequency_penalty, chat.presence_penalty)


def offered_tools(chat: ChatCompletionRequest) -> Sequence[ToolDefinition]:
    """Return the tools that the prompt describes: none if the request forbids tool calls."""
    return () if chat.tools is None or chat.tool_choice == "none" else chat.tools


def refuse_oversized(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], text: str, model: ServedModel
) -> None:
    """Raise `ContextExceeded` before tokenising a prompt that cannot fit, judging by its characters.

    A message has at least one token, and the tokens of any tokenizer are shorter than `_LONGEST_TOKEN` on average.
    """
    most = model.context_length * _LONGEST_TOKEN
    length = len(text) + sum(map(_characters, messages))
    length += sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools)
    if length > most or len(messages) > model.context_length:
        raise ContextExceeded(
            f"the prompt must leave room for a token in the context of {model.context_length} tokens, it has "
            f"{len(messages)} messages of {length} characters; shorten it",
            param="prompt" if text else "messages",
        )


def _characters(message: ChatMessage) -> int:
    calls = message.tool_calls or ()
    return (
        len(message.content)
        + len(message.reasoning_content or "")
        + sum(len(call.function.name) + len(call.function.arguments) for call in calls)
    )


def room_after(prompt: list[int], model: ServedModel, param: str) -> int:
    """Return the number of tokens that may follow `prompt`.

    Raises:
        ContextExceeded: there is no room for a token.
        InvalidRequest: the prompt is empty.
    """
    room = model.context_length - len(prompt)
    if not prompt:
        raise InvalidRequest("the prompt must have at least one token, got none", param=param)
    if room < 1:
        raise ContextExceeded(
            f"the prompt must leave room for a token in the context of {model.context_length} tokens, it has "
            f"{len(prompt)}; shorten it",
            param=param,
        )
    check_token_ids(prompt, model, param)
    return room


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise `InvalidRequest` unless all token ids are in the model's vocabulary. `token_ids` must not be empty."""
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= model.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(f"token ids must be in [0, {model.vocab_size}), got {wrong}", param=param)


def add_samples(
    work: Request,
    chat: ChatCompletionRequest,
    *,
    seed: int,
    new_text: Callable[[], TextWindow | None],
    vocab_size: int,
) -> None:
    """Add the requested samples to `work`; `new_text` builds the text window of a sample that needs one.

    Raises:
        InvalidRequest: a prefix has already ended, or has tokens outside the vocabulary.
    """
    if chat.prefixes is None:
        for key in rng.sample_keys(seed, chat.n).tolist():
            work.add_sequence(key, new_text())
        return
    keys = rng.sample_keys(seed, chat.prefixes[-1].index + 1).tolist()
    for place, prefix in enumerate(chat.prefixes):
        text = new_text()
        ended = _end_of(prefix, work, text=text, vocab_size=vocab_size)
        if ended:
            raise InvalidRequest(
                f"the prefix of sample {prefix.index} must be unfinished, it {ended}",
                param=f"prefixes.{place}.token_ids",
            )
        work.add_sequence(keys[prefix.index], text, prefix=prefix)


def _end_of(prefix: AnswerPrefix, work: Request, *, text: TextWindow | None, vocab_size: int) -> str:
    """Push the text of `prefix` into the window `text`. Return the reason why no token can follow the prefix, or ""."""
    token_ids = prefix.token_ids
    if len(token_ids) >= work.token_limit:
        return f"has {len(token_ids)} tokens of at most {work.token_limit}"
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        return f"has a token outside [0, {vocab_size})"
    if not work.stop_ids.isdisjoint(token_ids):
        return "has a token that ends a sample"
    if text is not None and any(text.push(token_id) for token_id in token_ids):
        return "has a stop string"
    return ""
