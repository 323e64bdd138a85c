"""A text window returns the text before the first stop string, however that string is split into tokens. A chunk names
the version that sampled its newest token.
"""

from __future__ import annotations

import itertools

import pytest

from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.engines.batching.sequence import ResponseWriter, TextWindow, extend
from pipelinerl.models.tokenizer import ChatTokenizer
from tests.fakes.sample_request import sample_request


def _window(tokenizer: ChatTokenizer, *stops: str) -> TextWindow:
    return TextWindow(tokenizer.detokenizer(), stops)


def _feed(window: TextWindow, tokenizer: ChatTokenizer, text: str) -> tuple[bool, str]:
    """Push the tokens of `text` up to a stop string; return whether a stop string occurred, and the text before it."""
    taken = ""
    for token_id in tokenizer.encode(text):
        stopped = window.push(token_id)
        taken += window.take()
        if stopped:
            return True, taken
    window.close()
    return False, taken + window.take()


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("hello world", (), "hello world", False),
        ("hello world", ("wor",), "hello ", True),
        ("aab", ("ab",), "a", True),
        ("abab", ("abc",), "abab", False),
        ("x+y=z", ("=", "y="), "x+", True),
        ("abcab", ("abd", "cab"), "ab", True),
        ("stop", ("stop",), "", True),
    ],
)
def test_streamed_text_is_cut_before_the_first_stop_string(
    tokenizer: ChatTokenizer, text: str, stops: tuple[str, ...], shown: str, stopped: bool
) -> None:
    window = _window(tokenizer, *stops)
    assert _feed(window, tokenizer, text) == (stopped, shown)
    assert window.text == shown


def test_stop_string_detected_in_streamed_text_is_that_of_a_search_in_the_whole_text(tokenizer: ChatTokenizer) -> None:
    stops = ("aba", "bb")
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        # The stop string that ends first wins; if several end together, the one that begins first.
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        shown = text[: min(ends)[1]] if ends else text
        assert _feed(_window(tokenizer, *stops), tokenizer, text) == (bool(ends), shown), text


def test_streamed_text_that_may_begin_a_stop_string_is_held_back(tokenizer: ChatTokenizer) -> None:
    window = _window(tokenizer, "end")
    shown = []
    for token_id in tokenizer.encode("xene"):
        window.push(token_id)
        shown.append(window.take())
    assert shown == ["x", "", "", "en"]
    window.close()
    assert window.take() == "e"


def test_chunk_sent_after_a_swap_names_the_version_that_sampled_its_tokens(tokenizer: ChatTokenizer) -> None:
    chat = ChatCompletionRequest(prompt_token_ids=[7], max_tokens=9, return_token_ids=True)
    request = sample_request([7], token_limit=9)
    request.add_sequence(noise_key=0)
    (sequence,) = request.sequences
    writer = ResponseWriter(chat, request, model="tiny", tokenizer=tokenizer)
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
