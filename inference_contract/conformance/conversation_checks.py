"""Checks of conversations of several turns: prompts with `continue_token_ids`, and answers with tool calls.

An engine may reject these fields, but must name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from inference_contract.conformance.chat_checks import check_columns, ids_of, prompt_of
from inference_contract.conformance.openai_checks import TOOL, answered, call_and_result
from inference_contract.conformance.session import MESSAGES, NotOffered, Session, checks_of, refused
from inference_contract.conformance.stream_checks import gathered
from inference_contract.schemas import ChatCompletion, Choice, FinishReason

_NEXT: Final = [{"role": "user", "content": "2 + 3 = "}]
#: The most seeds to try until an answer ends by itself.
_SEEDS: Final = 24
#: Tolerance in nats between the log-probs of a token when the same prompt is sent in two ways.
_APART: Final = 1e-3


def _answer(content: str) -> dict[str, Any]:
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
    """Return the prompt tokens of `messages`; raise `NotOffered` unless they begin with the tokens of `MESSAGES`."""
    opening, whole = prompt_of(session.chat(**fields)), prompt_of(session.chat(messages=messages, **fields))
    if whole[: len(opening)] != opening:
        raise NotOffered("the chat template renders earlier messages differently once others follow")
    return whole


def conversation_continues_exactly(session: Session) -> None:
    """A continued conversation keeps the given tokens exactly, and the next answer is sampled after all of them."""
    messages = [*MESSAGES, _answer("1"), *_NEXT]
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
    """If `continue_token_ids` are as the template renders them, the prompt equals the rendering of all messages."""
    one, two = (_appends(session, [*MESSAGES, _answer(digit), *_NEXT]) for digit in ("3", "4"))
    different = [place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]]
    if len(one) != len(two) or len(different) != 1:
        raise NotOffered("answers of one digit differ in more than one token, so the end of an answer is not known")
    end = different[0] + 1
    prompt = prompt_of(_continued(session, [*MESSAGES, _answer("3"), *_NEXT], one[:end], 2))
    assert prompt == one, f"after the {end} known tokens the prompt must have the {one[end:]} of the full rendering"


def bad_continuations_are_refused(session: Session) -> None:
    """Inconsistent or invalid `continue_token_ids` and `continue_from` are rejected, never ignored or clamped."""
    messages = [*MESSAGES, _answer("3"), *_NEXT]
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
    """Return a conversation's tokens as (prompt, tool call, all after the call); None if the engine rejects tools."""
    messages = [*MESSAGES, *call_and_result("3")]
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
    """An answer with a tool call has `tool_calls` and the finish_reason `tool_calls`; or tools are rejected by name."""
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
    for choice in (*completion.choices, *gathered(session.stream(tools=[TOOL], **fields))):
        _check_call(choice)
    unoffered: tuple[dict[str, Any], ...] = ({}, {"tools": [TOOL], "tool_choice": "none"})
    for each in unoffered:
        plain = session.chat(**fields, **each).choices[0]
        assert not plain.message.tool_calls, "without tools, or with tool_choice none, an answer has no calls"
        assert plain.message.content, "a call that is not parsed must stay in the text"
        assert plain.finish_reason is FinishReason.STOP, f"finish_reason must be stop, got {plain.finish_reason}"


def _check_call(choice: Choice) -> None:
    calls, text = choice.message.tool_calls or [], choice.message.content
    got, expected = (
        [call.for_template()["function"] for call in calls],
        [{"name": "add", "arguments": {"a": 1, "b": 2}}],
    )
    assert got == expected, f"the answer must have the calls {expected}, it has {got}"
    assert all(call.id for call in calls), "each call must have an id"
    assert not text.strip(), f"a parsed call is not part of the text, got {text!r}"
    assert choice.finish_reason is FinishReason.TOOL_CALLS, (
        f"finish_reason must be tool_calls, got {choice.finish_reason}"
    )


def tool_results_continue_calls_or_are_refused(session: Session) -> None:
    """A prompt continued after a tool call equals the rendering of all messages; or tools are rejected by name."""
    conversation = _with_call(session)
    if conversation is None:
        return
    opening, called, after = conversation
    messages = [*MESSAGES, *call_and_result("3")]
    for known in ([*opening, *called], [*opening, *called, after[0]]):
        prompt = prompt_of(_continued(session, messages, known, 2, tools=[TOOL]))
        whole = [*opening, *called, *after]
        assert prompt == whole, f"after {len(known)} known tokens {whole[len(known) :]} must follow, got {prompt}"


CHECKS = checks_of(globals())
