"""Checks of `/v1/chat/completions` streamed: it must amount to the same answer, and end well or early."""

from __future__ import annotations

from collections.abc import Iterable

from inference_contract.conformance.chat_checks import stoppable
from inference_contract.conformance.session import Session
from inference_contract.schemas import AssistantMessage, ChatCompletionChunk, Choice, FinishReason


def gathered(chunks: Iterable[ChatCompletionChunk]) -> list[Choice]:
    """The whole choices that a stream amounts to, by index."""
    text: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, FinishReason] = {}
    for part in (part for chunk in chunks for part in chunk.choices):
        index = part.index
        assert index not in ends, f"choice {index} got a chunk after its finish_reason"
        text[index] = text.get(index, "") + (part.delta.content or "")
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
            message=AssistantMessage(content=text[index]),
            finish_reason=ends[index],
            token_ids=ids[index],
            token_logprobs=logprobs[index],
            version_spans=spans.get(index, []),
        )
        for index in sorted(text)
    ]


def stream_equals_whole(session: Session) -> None:
    """A streamed completion amounts to the one that is answered whole, for the same seed."""
    whole = session.chat(n=3, seed=9).choices
    streamed = gathered(session.stream(n=3, seed=9))
    assert len(streamed) == 3, f"n=3 must stream three choices, got {len(streamed)}"
    for one, two in zip(whole, streamed, strict=True):
        for name in ("message", "token_ids", "token_logprobs", "version_spans", "finish_reason"):
            expected, got = getattr(one, name), getattr(two, name)
            assert expected == got, f"choice {one.index}: the stream's {name} is {got}, answered whole it is {expected}"


def stream_equals_whole_with_stop(session: Session) -> None:
    """Text that turns out to begin a stop string is never streamed."""
    seed, _, stop = stoppable(session)
    whole = session.chat(seed=seed, stop=[stop]).choices[0]
    streamed = gathered(session.stream(seed=seed, stop=[stop]))[0]
    assert streamed.message.content == whole.message.content, (
        f"with stop={stop!r} the stream's text is {streamed.message.content!r}, whole it is {whole.message.content!r}"
    )


def stream_carries_usage(session: Session) -> None:
    """`stream_options.include_usage` gives a last chunk with usage and no choices."""
    chunks = list(session.stream(stream_options={"include_usage": True}))
    last = chunks[-1]
    assert last.usage is not None and not last.choices, "the last chunk must carry usage and no choices"
    sampled = sum(len(part.token_ids or ()) for chunk in chunks for part in chunk.choices)
    assert last.usage.completion_tokens == sampled, "the usage of a stream must count the tokens streamed"


def leaving_a_stream_frees_it(session: Session) -> None:
    """A client that goes away in the middle of a stream leaves an engine that answers."""
    for _ in range(3):
        stream = session.stream(n=8, max_tokens=64)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
    session.chat()


CHECKS = (stream_equals_whole, stream_equals_whole_with_stop, stream_carries_usage, leaving_a_stream_frees_it)
