"""Checks of streamed `/v1/chat/completions`: same answer as without streaming, and resources freed on disconnect."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from inference_contract.conformance.chat_checks import stoppable
from inference_contract.conformance.session import NotOffered, Session, checks_of
from inference_contract.schemas import AssistantMessage, ChatCompletionChunk, Choice, FinishReason
from inference_contract.tools import ToolCall

#: In `disconnect_frees_a_stream`: the most streams that the check abandons, then the most samples of one stream.
_LEAVINGS: Final = 8
_MOST_SAMPLES: Final = 64


def gathered(chunks: Iterable[ChatCompletionChunk]) -> list[Choice]:
    """Assemble the complete choices from a stream's chunks, ordered by index."""
    text: dict[int, str] = {}
    calls: dict[int, list[ToolCall]] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, FinishReason] = {}
    for part in (part for chunk in chunks for part in chunk.choices):
        index = part.index
        assert index not in ends, f"choice {index} got a chunk after its finish_reason"
        text[index] = text.get(index, "") + (part.delta.content or "")
        for call in part.delta.tool_calls or ():
            whole = ToolCall.model_validate({"id": call.id, "function": call.function.model_dump()})
            calls.setdefault(index, []).append(whole)
        ids.setdefault(index, []).extend(part.token_ids or ())
        logprobs.setdefault(index, []).extend(part.token_logprobs or ())
        for version, count in part.version_spans or ():
            merged = spans.setdefault(index, [])
            if merged and merged[-1][0] == version:
                merged[-1] = (version, merged[-1][1] + count)
            else:
                merged.append((version, count))
        if part.finish_reason is not None:
            ends[index] = part.finish_reason
    assert ends.keys() == text.keys(), f"choices {sorted(text.keys() - ends.keys())} never got a finish_reason"
    return [
        Choice(
            index=index,
            message=AssistantMessage(content=text[index], tool_calls=calls.get(index)),
            finish_reason=ends[index],
            token_ids=ids[index],
            token_logprobs=logprobs[index],
            version_spans=spans.get(index, []),
        )
        for index in sorted(text)
    ]


def stream_equals_whole(session: Session) -> None:
    """A streamed completion equals the unstreamed completion with the same seed."""
    whole = session.chat(n=3, seed=9).choices
    check_streamed(gathered(session.stream(n=3, seed=9)), whole)


def check_streamed(streamed: list[Choice], whole: list[Choice]) -> None:
    """Fail unless the gathered choices of a stream equal those of the unstreamed answer to the same request."""
    assert len(streamed) == len(whole), f"n={len(whole)} must stream {len(whole)} choices, got {len(streamed)}"
    for one, two in zip(whole, streamed, strict=True):
        for name in ("message", "token_ids", "token_logprobs", "version_spans", "finish_reason"):
            expected, got = getattr(one, name), getattr(two, name)
            assert expected == got, (
                f"choice {one.index}: the stream's {name} is {got}, without streaming it is {expected}"
            )


def stream_equals_whole_with_stop(session: Session) -> None:
    """No part of a stop string that ends the sample is ever streamed."""
    seed, _, stop = stoppable(session)
    whole = session.chat(seed=seed, stop=[stop]).choices[0]
    streamed = gathered(session.stream(seed=seed, stop=[stop]))[0]
    assert streamed.message.content == whole.message.content, (
        f"with stop={stop!r} the stream's text is {streamed.message.content!r}, without streaming it is "
        f"{whole.message.content!r}"
    )


def stream_carries_usage(session: Session) -> None:
    """`stream_options.include_usage` adds a last chunk with usage and no choices."""
    chunks = list(session.stream(stream_options={"include_usage": True}))
    last = chunks[-1]
    assert last.usage is not None and not last.choices, "the last chunk must carry usage and no choices"
    sampled = sum(len(part.token_ids or ()) for chunk in chunks for part in chunk.choices)
    assert last.usage.completion_tokens == sampled, "the usage of a stream must count the tokens streamed"


def disconnect_frees_a_stream(session: Session) -> None:
    """The engine stops sampling for a client that disconnects in the middle of a stream."""
    n, length = 8, min(256, session.card().context_length // 2)
    wasted: list[str] = []
    for seed in range(_LEAVINGS):
        fields: dict[str, Any] = {"n": n, "max_tokens": length, "seed": seed}
        whole = session.chat(**fields).usage.completion_tokens
        before = session.generated_tokens()
        stream = session.stream(**fields)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
        at_leaving = session.generated_tokens() - before
        _await_idle(session)
        if at_leaving > whole / 2:
            # The stream was almost over, so it cannot show that the engine stopped early. Request more samples.
            n = min(2 * n, _MOST_SAMPLES)
            continue
        after_leaving = session.generated_tokens() - before - at_leaving
        if after_leaving <= (whole - at_leaving) / 2:
            before = session.generated_tokens()
            own = session.chat().usage.completion_tokens
            grown = session.generated_tokens() - before
            assert grown == own, f"no other request ran, but {grown:g} tokens were sampled for a request of {own}"
            return
        wasted.append(f"{after_leaving:g} of the {whole - at_leaving:g} tokens left of a stream")
    assert not wasted, f"after the client disconnected, the engine still sampled {', '.join(wasted)}"
    raise NotOffered(f"each of {_LEAVINGS} streams was half sampled before its client could disconnect")


def _await_idle(session: Session) -> None:
    deadline = time.monotonic() + session.timeout_s
    while running := session.metric("running_sequences"):
        assert time.monotonic() < deadline, (
            f"{session.timeout_s:g} s after a stream's client disconnected, {running:g} sequences still run"
        )
        time.sleep(0.001)


CHECKS = checks_of(globals())
