"""A text window returns the text before the first stop string, however that string is split into tokens. A chunk names
the version that sampled its newest token.
"""

import itertools
from functools import cache

import pytest

from inference_contract.completions import whole_text
from inference_contract.conformance.stream_checks import check_streamed, gathered
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl import rng
from pipelinerl.engines.batching.sequence import ResponseWriter, ShownText, TextWindow, extend, sampled
from pipelinerl.models.tokenizer import ChatTokenizer
from tests.fakes.call_templates import ALL_TEMPLATES, TOOLS, answers
from tests.fakes.sample_request import sample_request
from tests.fakes.tool_model import tool_tokenizer


def _window(tokenizer, *stops):
    return TextWindow(tokenizer.detokenizer(), stops)


def _feed(window, tokenizer, text):
    """Push the tokens of `text` up to a stop string; return whether a stop string occurred, and the text before it."""
    taken = ""
    for token_id in tokenizer.encode(text):
        stopped = window.push(token_id)
        taken += window.take()
        if stopped:
            return True, taken
    window.close()
    return False, taken + window.take()


def test_stop_string_detected_in_streamed_text_is_that_of_a_search_in_the_whole_text(tokenizer):
    stops = ("aba", "bb")
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        # The stop string that ends first wins; if several end together, the one that begins first.
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        shown = text[: min(ends)[1]] if ends else text
        assert _feed(_window(tokenizer, *stops), tokenizer, text) == (bool(ends), shown), text


def test_streamed_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
    window = _window(tokenizer, "end")
    shown = []
    for token_id in tokenizer.encode("xene"):
        window.push(token_id)
        shown.append(window.take())
    assert shown == ["x", "", "", "en"]
    window.close()
    assert window.take() == "e"


def _written(tokenizer, *, token_limit=9, **fields):
    """Return the writer of an answer to a request of one token, and its only sequence."""
    chat = ChatCompletionRequest(prompt_token_ids=[7], max_tokens=9, **fields)
    request = sample_request([7], token_limit=token_limit)
    request.add_sequence(noise_key=0)
    return ResponseWriter(chat, request, model="tiny", tokenizer=tokenizer), *request.sequences


def test_chunk_sent_after_a_swap_names_the_version_that_sampled_its_tokens(tokenizer):
    writer, sequence = _written(tokenizer, return_token_ids=True)
    assert sequence.newest_version == 0
    versions = []
    for version in (4, 5, 6):
        sequence.mark_version(version)
        if version > 4:  # tokens of the version before the swap, except the last one, which may end the sample
            chunk = writer.new_tokens(all_of_it=False)
            assert chunk is not None
            versions.append((chunk.model_version, chunk.choices[0].version_spans, sequence.newest_version))
        extend([sequence], [8], [-1.0])
        extend([sequence], [9], [-1.0])
    assert versions == [(4, [(4, 1)], 4), (5, [(4, 1), (5, 1)], 5)]


@pytest.mark.parametrize(
    ("text", "streamed"),
    [
        ("plain text", "plain text"),
        ("<think>\nhm\n</think>\n\nSure.\n<tool_call>x", "<think>\nhm\n</think>\n\nSure."),
        ("a [b", "a"),
        (" begins with a space", ""),
        ("to=functions.f", ""),
    ],
)
def test_text_beside_offered_tools_is_streamed_while_it_can_be_part_of_no_call(text, streamed):
    for size in (1, 2, 7):
        shown = ShownText()
        assert "".join(shown.more(text[at : at + size]) for at in range(0, len(text), size)) == streamed


@cache
def _tool_tokenizer():
    return tool_tokenizer()


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_streamed_answer_has_the_same_calls_as_the_whole_wherever_tokens_begin(name):
    made = _tool_tokenizer()
    made.chat_template = ALL_TEMPLATES[name].source
    tokenizer = ChatTokenizer(made, {made.convert_tokens_to_ids("<|end|>")})
    for number, answer in enumerate(answers(name, rng.generator(7, name), 2)):
        prompt = [*tokenizer.encode("hello"), *tokenizer.encode(answer.opened_by)]
        parts = answer.text if number % 2 else [answer.text]  # a token for each letter, or tokens of several letters
        ids = [*(token for part in parts for token in tokenizer.encode(part)), *tokenizer.eos_token_ids]
        fields = {"prompt_token_ids": prompt, "max_tokens": len(ids), "tools": TOOLS, "return_token_ids": True}
        chat = ChatCompletionRequest.model_validate(fields | {"stream": True})
        request = sample_request(prompt, token_limit=len(ids), streams=True, stop_ids=tokenizer.eos_token_ids)
        request.add_sequence(number, TextWindow(tokenizer.detokenizer(), ()))
        (sequence,) = request.sequences
        sequence.mark_version(1)
        writer = ResponseWriter(chat, request, model="tiny", tokenizer=tokenizer)
        chunks = [writer.first_chunk(1)]
        for token_id in ids:
            extend([sequence], [token_id], [-1.0])
            chunks.append(writer.token_chunk(sampled(sequence)[1]))
        whole = writer.completion().choices
        check_streamed(gathered(chunks), whole)
        calls = whole[0].message.tool_calls or []
        got = [call.for_template()["function"] for call in calls]
        assert got == [{"name": name, "arguments": arguments} for name, arguments in answer.calls]


def test_log_prob_record_of_a_token_that_is_part_of_a_character_has_its_byte():
    made = tool_tokenizer()
    tokenizer = ChatTokenizer(made, {made.convert_tokens_to_ids("<|end|>")})
    ids = tokenizer.encode("😀")
    writer, sequence = _written(tokenizer, token_limit=len(ids), logprobs=True, top_logprobs=1)
    sequence.mark_version(1)
    for token_id in ids:
        extend([sequence], [token_id], [-1.0])
        sequence.top.append([(token_id, -1.0)])
    answer = writer.completion()
    records = answer.choices[0].logprobs.content
    assert [record.bytes for record in records] == [[0xF0], [0x9F], [0x98], [0x80]]
    assert [record.top_logprobs[0].bytes for record in records] == [record.bytes for record in records]
    text = whole_text([answer]).choices[0].logprobs
    assert text is not None and text.tokens == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert text.text_offset == [0, 0, 0, 0] and text.top_logprobs[0] == {"bytes:\\xf0": -1.0}
