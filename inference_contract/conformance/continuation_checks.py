"""Checks of continued answers (requests with `prefixes`) and of streams with a minimum interval between chunks."""

from __future__ import annotations

from typing import Any, Final

from inference_contract.conformance.chat_checks import check_columns, ids_of, stoppable
from inference_contract.conformance.session import NotOffered, Session, checks_of, chunks, refused
from inference_contract.conformance.stream_checks import check_streamed, gathered
from inference_contract.schemas import Choice, Continuation, FinishReason

_LENGTH: Final = 12
#: The most seeds to try until one gives answers that are long enough to split.
_SEEDS: Final = 24


def _offered(session: Session) -> Continuation:
    offered = session.health().continuation
    if offered is Continuation.NONE:
        raise NotOffered("/health says continuation = none: answers that another engine started are restarted")
    return offered


def _long(session: Session, **fields: Any) -> tuple[int, list[Choice]]:
    """Return a seed and three answers sampled with it, of which the first and last are long enough to split."""
    for seed in range(_SEEDS):
        choices = session.chat(n=3, seed=seed, max_tokens=_LENGTH, **fields).choices
        if min(len(ids_of(choices[0])), len(ids_of(choices[2]))) >= 4:
            return seed, choices
    raise NotOffered(f"none of {_SEEDS} seeds gives answers of four tokens, so none can be split")


#: Numbers of tokens in the two prefixes of `_cut`.
_ENDS: Final = (1, 2)


def _prefix(choice: Choice, length: int) -> dict[str, Any]:
    return {"index": choice.index, "token_ids": ids_of(choice)[:length]}


def _cut(*choices: Choice) -> list[dict[str, Any]]:
    """Return the request's `prefixes` for two choices: the first token of one choice, the first two of the next."""
    return [_prefix(choice, end) for choice, end in zip(choices, _ENDS, strict=True)]


def _equal_rest(whole: Choice, rest: Choice, start: int) -> None:
    assert rest.index == whole.index, f"the rest of choice {whole.index} must keep its index, got {rest.index}"
    check_columns(rest)
    expected, got = ids_of(whole)[start:], ids_of(rest)
    assert got == expected, f"after {start} tokens of choice {whole.index}, {expected} must follow, got {got}"
    assert rest.message.content == whole.message.content, (
        f"the text must be that of the whole answer, {whole.message.content!r}, got {rest.message.content!r}"
    )
    assert rest.finish_reason is whole.finish_reason, (
        f"finish_reason must be that of the whole answer, {whole.finish_reason}, got {rest.finish_reason}"
    )


def _continues(session: Session, **fields: Any) -> None:
    seed, (first, second, last) = _long(session, **fields)
    empty = {"index": 1, "token_ids": []}
    (restarted,) = session.chat(n=1, seed=seed, max_tokens=_LENGTH, prefixes=[empty], **fields).choices
    _equal_rest(second, restarted, 0)
    prefixes = _cut(first, last)
    rest = session.chat(n=2, seed=seed, max_tokens=_LENGTH, prefixes=prefixes, **fields)
    assert len(rest.choices) == 2, f"two prefixes must give two choices, got {len(rest.choices)}"
    assert rest.usage.completion_tokens == sum(len(ids_of(each)) for each in rest.choices), "usage counts new tokens"
    streamed = gathered(session.stream(n=2, seed=seed, max_tokens=_LENGTH, prefixes=prefixes, **fields))
    for choices in (rest.choices, streamed):
        for whole, part, end in zip((first, last), choices, _ENDS, strict=True):
            _equal_rest(whole, part, end)


def greedy_answer_continues(session: Session) -> None:
    """A greedy answer continued from a prefix has the missing tokens, the whole text and the same finish reason."""
    _offered(session)
    _continues(session, temperature=0.0)


def sampled_answer_continues(session: Session) -> None:
    """A sampled answer continued from a prefix equals the whole answer; with `own_noise` it need only be valid."""
    if _offered(session) is Continuation.SAME_NOISE:
        _continues(session)
        return
    seed, (first, _, last) = _long(session)
    fields: dict[str, Any] = {"n": 2, "seed": seed, "max_tokens": _LENGTH, "prefixes": _cut(first, last)}
    rest = session.chat(**fields).choices
    assert [each.index for each in rest] == [0, 2], f"the answer must continue choices 0 and 2, got {rest}"
    for each, end in zip(rest, _ENDS, strict=True):
        check_columns(each)
        count = len(ids_of(each))
        assert 1 <= count <= _LENGTH - end, f"after {end} of {_LENGTH} tokens at most the rest may follow, got {count}"
    for one, two in zip(rest, session.chat(**fields).choices, strict=True):
        assert ids_of(one) == ids_of(two), f"seed {seed} must repeat the rest of choice {one.index}"


def prefix_counts_towards_max_tokens(session: Session) -> None:
    """max_tokens limits the whole answer, prefix included."""
    _offered(session)
    seed, (first, *_) = _long(session)
    (rest,) = session.chat(n=1, seed=seed, max_tokens=3, prefixes=[_prefix(first, 2)]).choices
    assert len(ids_of(rest)) == 1, f"max_tokens=3 leaves one token after two, got {len(ids_of(rest))}"
    if rest.finish_reason is not FinishReason.STOP:
        assert rest.finish_reason is FinishReason.LENGTH, f"finish_reason must be length, got {rest.finish_reason}"


def stop_string_may_span_the_prefix(session: Session) -> None:
    """A stop string may begin in the prefix and be completed after it; the answer's text then stops before it."""
    # If the engine draws new noise for the rest of an answer, only greedy answers can be compared. A prompt has just
    # one greedy answer, so each attempt uses another prompt.
    warmth = {"temperature": 0.0} if _offered(session) is Continuation.OWN_NOISE else {}
    prompt = session.chat().prompt_token_ids or []
    for number in range(_SEEDS):
        stopped = _stopped(session, seed=number, prompt_token_ids=prompt[-1 - number % len(prompt) :], **warmth)
        if stopped is not None:
            _equal_rest(*stopped)
            return
    raise NotOffered(f"no answer of {_SEEDS} seeds can be split within a stop string")


def _stopped(session: Session, **fields: Any) -> tuple[Choice, Choice, int] | None:
    """Return (answer that a stop string ends, continuation without its last token, number of its tokens), or None."""
    text = session.chat(**fields).choices[0].message.content
    stop = text[1:3]
    if len(stop) < 2 or "\ufffd" in text:
        return None
    whole = session.chat(**fields, stop=stop).choices[0]
    end = len(ids_of(whole)) - 1
    if end < 1 or whole.finish_reason is not FinishReason.STOP:
        return None
    return whole, session.chat(**fields, stop=stop, prefixes=[_prefix(whole, end)]).choices[0], end


def ended_prefix_is_refused(session: Session) -> None:
    """Prefixes that max_tokens or a stop string has ended are rejected; so are lists that repeat or lack a sample."""
    _offered(session)
    seed, text, stop = stoppable(session)
    ids = ids_of(session.chat(seed=seed).choices[0])
    twice = [{"index": 1, "token_ids": ids[:1]}] * 2
    for fields in (
        {"max_tokens": 2, "prefixes": [{"index": 0, "token_ids": ids[:2]}]},
        {"stop": stop, "prefixes": [{"index": 0, "token_ids": ids[: len(text)]}]},
        {"n": 2, "prefixes": twice},
        {"n": 2, "prefixes": twice[:1]},
    ):
        refused(session.completed(seed=seed, **fields), 400, code="invalid_request_error")


def unknown_prefix_is_refused(session: Session) -> None:
    """A prefix with a negative token id, or an id beyond any vocabulary, is rejected, never clamped or wrapped."""
    _offered(session)
    ids = ids_of(session.chat(seed=3, max_tokens=2).choices[0])[:1]
    for token in (2**31 - 1, -1):
        prefixes = [{"index": 0, "token_ids": [*ids, token]}]
        refused(session.completed(seed=3, max_tokens=4, prefixes=prefixes), 400, code="invalid_request_error")


def fewer_chunks_give_the_same_answer(session: Session) -> None:
    """`stream_options.interval_s` reduces the number of chunks and does not change the answer."""
    _offered(session)
    whole = session.chat(n=3, seed=9).choices
    response = session.streamed(n=3, seed=9, stream_options={"interval_s": 3600.0})
    received = list(chunks(response, response.iter_lines()))
    assert len(received) == 1, f"with interval_s=3600 a short answer must arrive in one chunk, got {len(received)}"
    assert received[0].prompt_token_ids, "with return_token_ids a stream must begin with prompt_token_ids"
    check_streamed(gathered(received), whole)


CHECKS = checks_of(globals())
