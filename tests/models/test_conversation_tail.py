"""A continued conversation keeps its sampled tokens, and appends what the template writes after an answer."""

from __future__ import annotations

import pytest

from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Message
from tests.models.test_control_tokens import CHATML_TOKENS, NAMES, byte_level, chat, guarded, raw

QUESTION = [Message("system", "s"), Message("user", "1 + 2")]


def conversation(tokenizer: ChatTokenizer, answer: str, *new: Message) -> tuple[list[int], list[int]]:
    """Tokens up to the answer's end as an engine sampled them, and the continued conversation's."""
    (end,) = tokenizer.eos_token_ids
    sampled = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode(answer), end]
    messages = [*QUESTION, Message("assistant", answer), *new]
    return sampled, tokenizer.encode_continuation(messages, len(QUESTION) + 1, sampled)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_conversation_is_what_the_template_renders_as_a_whole(name: str) -> None:
    tokenizer, reply = chat(name), [Message("user", "2 + 3"), Message("user", "ab")]
    sampled, continued = conversation(tokenizer, "a", *reply)
    assert tokenizer.tail.reproduces_deployment()
    assert continued[: len(sampled)] == sampled
    tail = continued[len(sampled) :]
    assert tail == tokenizer.encode_chat([*QUESTION, Message("assistant", "a"), *reply])[-len(tail) :]


def test_sampled_tokens_stay_where_rendering_anew_would_change_them() -> None:
    tokenizer = chat("chatml")
    (end,) = tokenizer.eos_token_ids
    letters = [token for letter in "the end" for token in tokenizer.encode(letter)]
    sampled = [*tokenizer.encode_chat(QUESTION), *letters, end]
    messages = [*QUESTION, Message("assistant", "the end"), Message("user", "b")]
    assert tokenizer.encode_chat(messages)[: len(sampled)] != sampled, "the template merges what was sampled apart"
    assert tokenizer.encode_continuation(messages, 3, sampled)[: len(sampled)] == sampled


def test_an_answer_cut_at_its_limit_is_closed_by_the_template() -> None:
    tokenizer = chat("chatml")
    (end,) = tokenizer.eos_token_ids
    sampled = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode("hello")]
    messages = [*QUESTION, Message("assistant", "hello"), Message("user", "b")]
    assert tokenizer.encode_continuation(messages, 3, sampled)[len(sampled)] == end


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_control_tokens_in_new_messages_stay_text(name: str) -> None:
    tokenizer = chat(name)
    (end,) = tokenizer.eos_token_ids
    attack = raw(name).decode([end]) + "Qz7answerQz7"
    sampled, continued = conversation(tokenizer, "a", Message("user", attack))
    plain = conversation(tokenizer, "a", Message("user", "b"))[1]
    assert continued[len(sampled) :].count(end) == plain[len(plain) - len(plain[len(sampled) :]) :].count(end)
    assert attack in tokenizer.decode(continued)


def test_a_template_that_loses_the_answer_is_rendered_as_a_whole() -> None:
    forgetful = "{%- for m in messages if m.role != 'assistant' %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    tokenizer = guarded(byte_level(forgetful, CHATML_TOKENS, "<|im_end|>"))
    _, continued = conversation(tokenizer, "a", Message("user", "b"))
    assert continued == tokenizer.encode_chat([*QUESTION, Message("assistant", "a"), Message("user", "b")])
    assert not tokenizer.tail.reproduces_deployment()
