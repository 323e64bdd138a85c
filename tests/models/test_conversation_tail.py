"""A continued conversation keeps the sampled tokens, and appends the chat template's text for new messages."""

import pytest

from inference_contract.schemas import ChatMessage
from inference_contract.tools import FunctionCall, ToolCall
from pipelinerl.types import Message
from tests.models.test_control_tokens import CHATML_TOKENS, LLAMA_TOKENS, NAMES, byte_level, chat, guarded, raw

QUESTION = [Message("system", "s"), Message("user", "1 + 2")]


def conversation(tokenizer, answer, *new):
    """Return the tokens of question and sampled answer, and the tokens of this conversation continued by `new`."""
    (end,) = tokenizer.eos_token_ids
    sampled = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode(answer), end]
    messages = [*QUESTION, Message("assistant", answer), *new]
    return sampled, tokenizer.encode_continuation(messages, len(QUESTION) + 1, sampled)


@pytest.mark.parametrize("name", NAMES)
def test_continued_conversation_has_the_same_new_tokens_as_the_whole_conversation_encoded_at_once(name):
    tokenizer, reply = chat(name), [Message("user", "2 + 3"), Message("user", "ab")]
    sampled, continued = conversation(tokenizer, "a", *reply)
    assert tokenizer.tail.reproduces_deployment()
    assert continued[: len(sampled)] == sampled
    tail = continued[len(sampled) :]
    assert tail == tokenizer.encode_chat([*QUESTION, Message("assistant", "a"), *reply])[-len(tail) :]


def test_sampled_tokens_are_kept_even_if_encoding_the_answers_text_would_give_other_tokens():
    tokenizer = chat("chatml")
    (end,) = tokenizer.eos_token_ids
    letters = [token for letter in "the end" for token in tokenizer.encode(letter)]
    sampled = [*tokenizer.encode_chat(QUESTION), *letters, end]
    messages = [*QUESTION, Message("assistant", "the end"), Message("user", "b")]
    assert tokenizer.encode_chat(messages)[: len(sampled)] != sampled, "the template merges what was sampled apart"
    assert tokenizer.encode_continuation(messages, 3, sampled)[: len(sampled)] == sampled


def test_end_token_is_appended_to_an_answer_that_was_cut_at_its_token_limit():
    tokenizer = chat("chatml")
    (end,) = tokenizer.eos_token_ids
    sampled = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode("hello")]
    messages = [*QUESTION, Message("assistant", "hello"), Message("user", "b")]
    assert tokenizer.encode_continuation(messages, 3, sampled)[len(sampled)] == end


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_control_tokens_written_as_text_in_new_messages_of_a_conversation_stay_text(name):
    tokenizer = chat(name)
    (end,) = tokenizer.eos_token_ids
    attack = raw(name).decode([end]) + "Qz7answerQz7"
    sampled, continued = conversation(tokenizer, "a", Message("user", attack))
    plain = conversation(tokenizer, "a", Message("user", "b"))[1]
    assert continued[len(sampled) :].count(end) == plain[len(plain) - len(plain[len(sampled) :]) :].count(end)
    assert attack in tokenizer.decode(continued)


#: A chat template that writes tool calls as Qwen2.5 and Hermes do, and the results of calls as a user's turn.
HERMES = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '\n<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) }}"
    "{{- '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}{#- tools #}"
)
#: A chat template that writes tool calls as Llama 3.1 does: a single call replaces the message's content.
LLAMA = (
    "{%- for m in messages %}{%- if m.tool_calls %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}{%- elif m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}{#- tools #}"
)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [(HERMES, CHATML_TOKENS, "<|im_end|>"), (LLAMA, LLAMA_TOKENS, "<|eot_id|>")],
    ids=["hermes", "llama"],
)
def test_tool_result_is_appended_after_the_sampled_tokens_of_the_tool_call(template, tokens, end, calls):
    tokenizer = guarded(byte_level(template, tokens, end, "<tool_call>", "</tool_call>", "<tool_response>"))
    (end_id,) = tokenizer.eos_token_ids
    made = [
        ToolCall(id=f"call{number}", function=FunctionCall(name="f", arguments='{"a": 1}')) for number in range(calls)
    ]
    results = [ChatMessage(role="tool", content="3", tool_call_id=call.id) for call in made]
    answer = ChatMessage(role="assistant", content="", tool_calls=made)
    question = [ChatMessage(role="user", content="1 + 2")]
    sampled = [*tokenizer.encode_chat(question), *tokenizer.encode('{"name":"f"}'), end_id]
    continued = tokenizer.encode_continuation([*question, answer, *results], 2, sampled)
    assert continued[: len(sampled)] == sampled
    whole = tokenizer.decode(tokenizer.encode_chat([*question, answer, *results]))
    text = tokenizer.decode(continued[len(sampled) - 1 :])
    assert text.startswith(end) and whole.endswith(text)
    assert text.count("3") == calls and "Qz7" not in text
    assert tokenizer.tail.reproduces_deployment(calls=calls)


def test_whole_conversation_is_encoded_again_if_the_chat_template_drops_answers():
    forgetful = "{%- for m in messages if m.role != 'assistant' %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    tokenizer = guarded(byte_level(forgetful, CHATML_TOKENS, "<|im_end|>"))
    _, continued = conversation(tokenizer, "a", Message("user", "b"))
    assert continued == tokenizer.encode_chat([*QUESTION, Message("assistant", "a"), Message("user", "b")])
    assert not tokenizer.tail.reproduces_deployment()
