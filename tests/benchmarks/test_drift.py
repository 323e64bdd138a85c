"""The benchmark of token drift: rendering a conversation again changes sampled tokens, and the gateway keeps them."""

import pytest

from benchmarks.drift import TEMPLATES, TemplateModel


@pytest.mark.parametrize(("name", "kind"), [("Qwen3", "both"), ("Llama 3.1", "tool"), ("Qwen3-2507", "tool")])
def test_continued_conversation_keeps_its_sampled_tokens_in_one_segment(name, kind):
    model = TemplateModel(TEMPLATES[name])
    assert [model.episode(kind, seed, 0.02) for seed in range(3)] == [(False, 1)] * 3
    assert any(model.naive_drifts(kind, seed, 0.02) for seed in range(3))
