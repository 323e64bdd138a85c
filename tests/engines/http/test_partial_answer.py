"""A partial answer keeps the received tokens and requests only the rest from the next engine."""

import pytest

from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import (
    AnswerPrefix,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    ChunkChoice,
    Delta,
    FinishReason,
)
from pipelinerl.engines.http.pool import PartialAnswer
from pipelinerl.errors import EngineUnreachable

ASKED = ChatCompletionRequest(
    messages=[ChatMessage(role="user", content="hi")], n=3, max_tokens=9, seed=4, return_token_ids=True, stop=["!"]
)


def part(index, ids, version, *, end=None, text=None):
    """Return the chunk of one sample, whose tokens have one version; the log-prob of a token is minus its id."""
    reason = None if end is None else FinishReason(end)
    spans = [(version, len(ids))] if ids else []
    return ChunkChoice(
        index=index, delta=Delta(content=text), finish_reason=reason,
        token_ids=ids, token_logprobs=[-float(i) for i in ids], version_spans=spans,
    )  # fmt: skip


def chunk(*parts, epoch=1, version=0, prompt=None):
    fields = {"model_version": version, "epoch": epoch, "prompt_token_ids": prompt}
    return ChatCompletionChunk(id="c", created=0, model="m", choices=list(parts), **fields)


def answer(*chunks):
    made = PartialAnswer(ASKED, interval_s=0.5)
    for each in chunks:
        assert made.take(each, url="a")
    return made


def test_remaining_request_contains_unfinished_samples_and_the_exact_prompt():
    begun = answer(
        chunk(part(0, [5, 6], 7), part(2, [8], 7), prompt=[1, 2]), chunk(part(0, [9], 8, end="stop", text="abc"))
    )
    rest = begun.rest()
    assert (rest.messages, rest.prompt_token_ids, rest.n) == (None, [1, 2], 2)
    assert rest.prefixes == [AnswerPrefix(index=1, token_ids=[]), AnswerPrefix(index=2, token_ids=[8])]
    assert (rest.max_tokens, rest.seed, rest.stop) == (9, 4, ["!"]), "of the whole answer"
    ChatCompletionRequest.model_validate_json(rest.model_dump_json())


def test_remaining_request_of_a_continued_conversation_uses_its_prompt_tokens():
    request = ChatCompletionRequest(
        messages=[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
        continue_token_ids=[1],
        continue_from=1,
        return_token_ids=True,
    )
    begun = PartialAnswer(request, interval_s=1.0)
    assert begun.rest().continue_token_ids == [1]
    assert begun.take(chunk(part(0, [5], 7), prompt=[1, 2]), url="a")
    rest = begun.rest()
    assert (rest.prompt_token_ids, rest.continue_token_ids, rest.continue_from) == ([1, 2], None, None)
    ChatCompletionRequest.model_validate_json(rest.model_dump_json())


def test_partial_answer_joins_tokens_and_version_spans_of_two_engines():
    """The second engine serves an older version than the first, which has also streamed text."""
    begun = answer(
        chunk(part(0, [5, 6], 7, text="ab"), part(1, [3], 7, end="length", text="x"), prompt=[1, 2]),
        chunk(part(0, [9], 8), part(2, [4], 8)),
    )
    begun.hand_over()
    begun.rest()
    assert begun.take(chunk(part(0, [7], 6), prompt=[1, 2]), url="b") and not begun.is_whole
    assert begun.take(chunk(part(0, [2], 6, end="stop", text="abcde"), part(2, [1], 6, end="stop", text="y")), url="b")
    assert begun.is_whole
    whole = begun.completion()
    first, second, third = whole.choices
    assert (first.token_ids, first.version_spans, first.message.content) == (
        [5, 6, 9, 7, 2],
        [(7, 2), (8, 1), (6, 2)],
        "abcde",
    )
    assert first.token_logprobs == [-5.0, -6.0, -9.0, -7.0, -2.0]
    assert (second.token_ids, second.version_spans, second.message.content) == ([3], [(7, 1)], "x")
    assert (third.token_ids, third.version_spans, third.finish_reason) == ([4, 1], [(8, 1), (6, 1)], "stop")
    assert (whole.prompt_token_ids, whole.usage.completion_tokens, whole.epoch, whole.model_version) == (
        [1, 2],
        8,
        1,
        8,
    )
    assert (begun.tokens_kept, begun.tokens_resampled) == (5, 0)


def test_tokens_kept_at_handovers_count_once_and_count_as_resampled_if_they_are_dropped_later():
    begun = answer(chunk(part(0, [5, 6], 7), prompt=[1]))
    begun.hand_over()
    begun.hand_over()
    assert begun.tokens_kept == 2
    begun.take(chunk(part(0, [9], 7)), url="b")
    begun.hand_over()
    assert begun.tokens_kept == 3
    begun.forget()
    assert (begun.tokens_kept, begun.tokens_resampled, begun.num_tokens) == (0, 3, 0)
    assert begun.rest().prefixes is None and begun.rest().messages == ASKED.messages


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(part(3, [1], 7)),
        chunk(part(0, [1], 7).model_copy(update={"version_spans": [(7, 2)]})),
        chunk(part(0, [1], 7).model_copy(update={"token_logprobs": []})),
        chunk(part(1, [1], 7)),
    ],
    ids=["a choice beyond n", "spans beyond the tokens", "no log-prob", "a token after the end"],
)
def test_stream_chunks_inconsistent_with_the_answer_are_rejected(wrong):
    begun = answer(chunk(part(1, [5], 7, end="stop"), prompt=[1]))
    with pytest.raises(EngineUnreachable):
        begun.take(wrong, url="b")


def test_stream_without_prompt_token_ids_is_rejected():
    with pytest.raises(EngineUnreachable, match="prompt_token_ids"):
        answer().take(chunk(part(0, [5], 7)), url="b")


def routed(index, ids, *, layers=2, end=None):
    """Return the chunk of one sample in which, in every layer, the expert number of a token is its id."""
    experts = RoutedExperts.of("uint8", (len(ids), layers, 1), bytes(i for i in ids for _ in range(layers)))
    return part(index, ids, 7, end=end).model_copy(update={"routed_experts": experts})


def test_routed_experts_of_chunks_are_joined_and_prompt_experts_are_taken_from_the_first_chunk():
    request = ASKED.model_copy(update={"n": 1, "stop": None, "return_routed_experts": True})
    made = PartialAnswer(request, interval_s=0.5)
    prompt = [RoutedExperts.of("uint8", (1, 2, 1), bytes([number, number])) for number in (3, 4)]
    for experts, each in zip(prompt, (routed(0, [5, 6]), routed(0, [9], end="stop")), strict=True):
        came = chunk(each, prompt=[1, 2]).model_copy(update={"prompt_routed_experts": experts})
        assert made.take(came, url="a")
    assert made.rest().return_routed_experts
    whole = made.completion()
    assert whole.prompt_routed_experts == prompt[0]
    assert whole.choices[0].routed_experts == RoutedExperts.of("uint8", (3, 2, 1), bytes([5, 5, 6, 6, 9, 9]))


@pytest.mark.parametrize("came", [part(0, [9], 7), routed(0, [9], layers=3)])
def test_streamed_tokens_without_their_routed_experts_are_rejected(came):
    request = ASKED.model_copy(update={"return_routed_experts": True})
    made = PartialAnswer(request, interval_s=0.5)
    made.take(chunk(routed(0, [5, 6]), prompt=[1, 2]), url="a")
    with pytest.raises(EngineUnreachable, match="must stream the routed experts of each new token"):
        made.take(chunk(came), url="http://b")
