"""Thinking is separated from an answer in the markers of each model family."""

import pytest

from pipelinerl.answers.thinking import OPENINGS, closing_of, opened_by, openings_in, split


@pytest.mark.parametrize("opening", OPENINGS)
def test_thinking_is_separated_from_the_answer_in_each_familys_markers(opening):
    closing = closing_of(opening)
    assert split(f"{opening}\nHm.\n{closing}\n\n4") == ("Hm.", "4")
    assert split(f"{opening}Hm.") == ("Hm.", ""), "thinking that was cut off"
    assert split(f"a{opening}one{closing}b{opening}two{closing}c") == ("one\ntwo", "abc")
    if closing != "<|end|>":
        assert split(f"Hm.{closing}4") == ("Hm.", "4"), "the prompt has opened the thinking"


def test_text_without_thinking_is_unchanged():
    assert split(" a <b> [c]<|end|> ") == ("", " a <b> [c]<|end|> ")


def test_messages_of_gpt_oss_are_shown_without_their_headers():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert split(text) == ("Hm.", "4")
    assert split("<|channel|>final<|message|>4") == ("", "4")


def test_opening_at_the_end_of_a_prompt_is_recognised():
    assert opened_by("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""


def test_markers_are_those_that_the_template_mentions():
    assert openings_in("{{ '[THINK]' }}") == ("[THINK]",)
    assert openings_in("{{ m.content.split('</think>') }}<|end|>") == ("<think>",)
    assert openings_in("{{ m.content }}") == OPENINGS
