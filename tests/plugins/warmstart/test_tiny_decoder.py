"""The warm start with several domains trains each until its reward is in a given range, then only rehearses it."""

from itertools import chain, repeat

import pytest
import torch

from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import (
    DecoderShape,
    WarmStartSettings,
    char_tokenizer,
    random_decoder,
    sampled_answers,
    warm_start,
    word_tokenizer,
)
from pipelinerl.types import Message, Problem

SHAPE = DecoderShape(hidden=16, layers=1, heads=2, intermediate=24, vocab=64)


def tokenizer():
    raw = char_tokenizer()
    return ChatTokenizer(raw, {raw.eos_token_id})


def problem(prompt, answer="1"):
    return Problem(
        problem_id=prompt, domain="d", messages=(Message("user", prompt),), ground_truth=answer, metadata={}, tags=()
    )


def settings(*rewards, **changes):
    """Return warm start settings of two domains; check n measures `rewards[n]`, all later checks `rewards[-1]`."""
    reported = chain(rewards, repeat(rewards[-1]))
    chosen = {"band": (0.3, 0.6), "tokens": 140, "max_steps": 8, "check_every": 2, "rehearsal": 0.25, **changes}
    return WarmStartSettings(
        demonstrations={"a": lambda i: problem(f"{i % 10}a"), "b": lambda i: problem(f"{i % 10}b")},
        skills=lambda _: next(reported),
        tokenizer=tokenizer(),
        shape=SHAPE,
        **chosen,
    )


def test_domain_in_its_target_reward_range_gets_fewer_demonstrations_until_its_reward_falls():
    checks = []
    rewards = [{"a": 0.4, "b": 0.1}, {"a": 0.2, "b": 0.1}, {"a": 0.4, "b": 0.5}]
    model, last = warm_start(settings(*rewards), checks.append)
    whole = checks[0].demonstrations["a"] // 2  # the number of demonstrations of each domain in a step
    shown = [tuple(check.demonstrations[name] // whole for name in "ab") for check in checks]
    assert whole >= 4 and whole % 4 == 0
    assert checks[1].demonstrations == {"a": 2 * whole + 2 * whole // 4, "b": 4 * whole}
    assert checks[2].demonstrations == {"a": 4 * whole + 2 * whole // 4, "b": 6 * whole}, shown
    assert last == checks[-1] and last.step == 6
    assert checks[-1].loss < checks[0].loss
    assert not model.training


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"a": 0.4, "b": 0.1}, r"expected a skill of 0\.3 to 0\.6, got a 0\.400, b 0\.100 after 8 steps"),
        ({"a": 0.4, "b": 0.7}, r"expected a skill of 0\.3 to 0\.6, got a 0\.400, b 0\.700 after 2 steps"),
    ],
)
def test_warm_start_fails_if_a_domains_reward_stays_below_or_jumps_above_the_range(rewards, message):
    with pytest.raises(ModelError, match=message):
        warm_start(settings(rewards))


def test_warm_start_with_the_same_settings_gives_the_same_weights():
    (first, _), (again, _) = (warm_start(settings({"a": 0.4, "b": 0.4})) for _ in range(2))
    weights = again.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in first.state_dict().items())


def test_answers_sampled_in_the_warm_start_follow_the_models_probabilities_in_any_batch():
    model, own = random_decoder(SHAPE, seed=3), tokenizer()
    model.get_input_embeddings().weight.data *= 4  # makes the probabilities of tokens differ
    short, long = problem("7"), problem("12 and 345 and 6789")
    problems = [short, long] * 1500
    answers = sampled_answers(model, own, problems, max_tokens=1, seed=0)
    assert answers == sampled_answers(model, own, problems, max_tokens=1, seed=0)
    assert answers != sampled_answers(model, own, problems, max_tokens=1, seed=1)
    for place, each in enumerate((short, long)):
        with torch.no_grad():
            chances = model(input_ids=torch.tensor([own.encode_chat(each.messages)])).logits[0, -1].softmax(-1)
        for token in chances.topk(3).indices.tolist():
            text = "" if token in own.eos_token_ids else own.decode([token])
            share = answers[place::2].count(text) / 1500
            assert share == pytest.approx(float(chances[token]), abs=0.045), (each.problem_id, text)


def test_sampling_in_the_warm_start_continues_until_the_end_token_or_max_tokens():
    model, own = random_decoder(SHAPE, seed=3), tokenizer()
    model.get_input_embeddings().weight.data *= 1000  # so that sampling always picks the likeliest token
    problems = [problem(text) for text in ("7", "12 and 345", "seven", "what is it?", "+", "nine and ten")]
    answers = sampled_answers(model, own, problems, max_tokens=9, seed=0)
    for each, answer in zip(problems, answers, strict=True):
        ids = own.encode_chat(each.messages)
        begun = len(ids)
        while len(ids) < begun + 9:
            with torch.no_grad():
                token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token in own.eos_token_ids:
                break
            ids.append(token)
        assert answer == own.decode(ids[begun:]), each.problem_id


def test_learned_tokenizer_reproduces_every_text_and_splits_digits():
    texts = ["Write a program that prints x plus 286.", "```\nx = int(input())\nprint(x + 286)\n```"] * 3
    raw = word_tokenizer(texts, vocab=290)
    own = ChatTokenizer(raw, {raw.eos_token_id})
    assert own.vocab_size == 290
    for text in (*texts, "größer als 7 – 漢字\n\n"):
        assert own.decode(own.encode(text)) == text
    assert len(own.encode("2862")) == 4
    assert len(own.encode(texts[0])) < len(texts[0]) / 2
    assert word_tokenizer(texts, vocab=290).get_vocab() == raw.get_vocab()
