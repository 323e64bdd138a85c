"""Checks of conversations of several turns: `continue_token_ids`, and the calls that an answer contains.

An engine may reject these fields, but must name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from inference_contract.conformance.chat_checks import check_columns, ids_of
from inference_contract.conformance.openai_checks import CALL, TOOL, answered, prompt_of
from inference_contract.conformance.session import MESSAGES, NotOffered, Session, refused
from inference_contract.schemas import AssistantMessage, ChatCompletion, FinishReason
from inference_contract.tools import ToolCall

_NEXT: Final = [{"role": "user", "content": "2 + 3 = "}]
_RESULT: Final = [{"role": "tool", "tool_call_id": CALL["id"], "content": "3"}]
#: Seeds to try until an answer ends by itself.
_SEEDS: Final = 24
#: Tolerance in nats between the log-probs of a token when the same prompt is sent in two ways.
_APART: Final = 1e-3


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _continued(
    session: Session, messages: Sequence[Any], ids: Sequence[int], first_new: int, **fields: Any
) -> ChatCompletion:
    given = {"messages": messages, "continue_token_ids": list(ids), "continue_from": first_new}
    completion = answered(session, "continue_", **given, **fields)
    if completion is None:
        raise NotOffered("the engine rejects continue_token_ids: each turn renders the whole conversation again")
    return completion


def _appends(session: Session, messages: Sequence[Any], **fields: Any) -> list[int]:
    """Return the rendering of `messages`. Raises `NotOffered` unless it begins with that of `MESSAGES`."""
    opening, whole = prompt_of(session.chat(**fields)), prompt_of(session.chat(messages=messages, **fields))
    if whole[: len(opening)] != opening:
        raise NotOffered("the chat template renders earlier messages differently once others follow")
    return whole


def conversation_continues_exactly(session: Session) -> None:
    """A continued conversation keeps the given tokens exactly, and the next answer is sampled after all of them."""
    messages = [*MESSAGES, _said("1"), *_NEXT]
    whole = _appends(session, messages)
    first = session.chat(seed=3, ignore_eos=True)
    known = [*prompt_of(first), *ids_of(first.choices[0])]
    completion = _continued(session, messages, known, 2, seed=4)
    prompt = prompt_of(completion)
    assert prompt[: len(known)] == known, f"the prompt must begin with the {len(known)} continue_token_ids"
    assert known != prompt != whole, "the new messages must follow the continue_token_ids"
    again = session.chat(prompt_token_ids=prompt, seed=4).choices[0]
    check_columns(completion.choices[0])
    assert ids_of(completion.choices[0]) == ids_of(again), "the same prompt as token ids must give the same sample"
    pairs = zip(completion.choices[0].token_logprobs or (), again.token_logprobs or (), strict=True)
    worst = max(abs(one - two) for one, two in pairs)
    assert worst < _APART, f"the same prompt as token ids must give the same log-probs, they differ by {worst:.2g}"


def tail_is_that_of_the_full_rendering(session: Session) -> None:
    """A continued prompt equals the rendering of all messages if the known tokens are those of the template."""
    one, two = (_appends(session, [*MESSAGES, _said(digit), *_NEXT]) for digit in ("3", "4"))
    different = [place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]]
    if len(one) != len(two) or len(different) != 1:
        raise NotOffered("answers of one digit differ in more than one token, so the end of an answer is not known")
    end = different[0] + 1
    prompt = prompt_of(_continued(session, [*MESSAGES, _said("3"), *_NEXT], one[:end], 2))
    assert prompt == one, f"after the {end} known tokens the prompt must have the {one[end:]} of the full rendering"


def bad_continuations_are_refused(session: Session) -> None:
    """Unusable `continue_token_ids` and `continue_from` are rejected, never ignored or clamped."""
    messages = [*MESSAGES, _said("3"), *_NEXT]
    known = prompt_of(session.chat())
    for wrong in (
        {"continue_token_ids": known},
        {"continue_from": 2},
        {"continue_token_ids": [], "continue_from": 2},
        {"continue_token_ids": known, "continue_from": 1},
        {"continue_token_ids": known, "continue_from": 4},
        {"continue_token_ids": known, "continue_from": 2, "prompt_token_ids": known},
        {"continue_token_ids": [*known, 2**31 - 1], "continue_from": 2},
        {"continue_token_ids": [*known, -1], "continue_from": 2},
    ):
        refused(session.completed(messages=messages, **wrong), 400, 422)
    length = session.card().context_length
    response = session.completed(messages=messages, continue_token_ids=known[:1] * length, continue_from=2)
    error = refused(response, 400, 422)
    if not str(error["param"]).startswith("continue_"):
        assert error["code"] == "context_length_exceeded", f"expected context_length_exceeded, got {error['code']!r}"


def _end_token(session: Session) -> int:
    for seed in range(_SEEDS):
        choice = session.chat(seed=seed, max_tokens=32, temperature=2.0).choices[0]
        if choice.finish_reason is FinishReason.STOP:
            return ids_of(choice)[-1]
    raise NotOffered(f"none of {_SEEDS} answers ends by itself, so the token that ends a turn is not known")


def _with_call(session: Session) -> tuple[list[int], list[int], list[int]] | None:
    """Return a conversation's tokens as prompt, answer that is a call, and rest; None if tools are rejected."""
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *_RESULT]
    if answered(session, "tools", "messages", tools=[TOOL], messages=messages) is None:
        return None
    whole, end = _appends(session, messages, tools=[TOOL]), _end_token(session)
    opening = prompt_of(session.chat(tools=[TOOL]))
    rest = whole[len(opening) :]
    if end not in rest:
        raise NotOffered("the template does not end an answer with a token that ends samples")
    length = rest.index(end)
    return opening, rest[:length], rest[length:]


def calls_are_parsed_or_refused(session: Session) -> None:
    """An answer that calls an offered tool has `tool_calls` and its finish_reason; or tools are rejected by name."""
    conversation = _with_call(session)
    if conversation is None:
        return
    _, called, (end, *_) = conversation
    fields: dict[str, Any] = {
        "prefixes": [{"index": 0, "token_ids": called}],
        "logit_bias": {str(end): 100},
        "max_tokens": len(called) + 1,
    }
    completion = answered(session, "prefixes", "logit_bias", tools=[TOOL], **fields)
    if completion is None:
        raise NotOffered("the engine rejects prefixes or logit_bias, so the kit cannot make the model call a tool")
    choice = completion.choices[0]
    _is_the_call(choice.message, choice.finish_reason)
    message, reasons = _gathered(session, tools=[TOOL], **fields)
    assert len(reasons) == 1, f"a stream must tell one finish_reason, it tells {reasons}"
    _is_the_call(message, reasons[0])
    unoffered: tuple[dict[str, Any], ...] = ({}, {"tools": [TOOL], "tool_choice": "none"})
    for each in unoffered:
        plain = session.chat(**fields, **each).choices[0]
        assert not plain.message.tool_calls, "without tools, or with tool_choice none, an answer has no calls"
        assert plain.message.content, "a call that is not parsed must stay in the text"
        assert plain.finish_reason is FinishReason.STOP, f"finish_reason must be stop, got {plain.finish_reason}"


def _is_the_call(message: AssistantMessage, reason: FinishReason) -> None:
    calls = [(call.function.name, ToolCall.for_template(call)["function"]) for call in message.tool_calls or ()]
    expected = [("add", {"name": "add", "arguments": {"a": 1, "b": 2}})]
    assert calls == expected, f"the answer must have the call {expected}, it has {calls}"
    assert all(call.id for call in message.tool_calls or ()), "each call must have an id"
    assert not message.content.strip(), f"a parsed call is not part of the text, got {message.content!r}"
    assert reason is FinishReason.TOOL_CALLS, f"finish_reason must be tool_calls, got {reason}"


def _gathered(session: Session, **fields: Any) -> tuple[AssistantMessage, list[FinishReason]]:
    text, calls, reasons = "", list[ToolCall](), list[FinishReason]()
    for part in (part for chunk in session.stream(**fields) for part in chunk.choices):
        text += part.delta.content or ""
        calls += [
            ToolCall.model_validate({"id": call.id, "function": call.function.model_dump()})
            for call in part.delta.tool_calls or ()
        ]
        reasons += [part.finish_reason] if part.finish_reason is not None else []
    return AssistantMessage(content=text, tool_calls=calls), reasons


def tool_results_continue_calls_or_are_refused(session: Session) -> None:
    """A prompt continued after a call equals the rendering of all messages; or tools are rejected by name."""
    conversation = _with_call(session)
    if conversation is None:
        return
    opening, called, after = conversation
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *_RESULT]
    for known in ([*opening, *called], [*opening, *called, after[0]]):
        prompt = prompt_of(_continued(session, messages, known, 2, tools=[TOOL]))
        whole = [*opening, *called, *after]
        assert prompt == whole, f"after {len(known)} known tokens {whole[len(known) :]} must follow, got {prompt}"


CHECKS = (
    conversation_continues_exactly,
    tail_is_that_of_the_full_rendering,
    bad_continuations_are_refused,
    calls_are_parsed_or_refused,
    tool_results_continue_calls_or_are_refused,
)
