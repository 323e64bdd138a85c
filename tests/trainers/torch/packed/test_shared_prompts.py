"""Prompts that rollouts share: which tokens are computed, and that nothing else about a pass changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.packed.segments import SegmentPlan, attend
from pipelinerl.trainers.torch.packed.shared_prompts import Distinct, Reading
from tests.trainers.torch.test_trainer import gradients, padded_twin, started
from trainer_contract.types import Head

OBJECTIVE = resolve("pipelinerl")
#: Answers to two prompts of 6 and 9 tokens, one to a third, and one rollout that has no sampled token.
LENGTHS = (12, 30, 9, 10, 12, 7, 40, 5, 16)
PROMPTS = (6, 6, 6, 9, 6, 6, 9, 5, 4)


@pytest.fixture
def shared(micro_batch):
    """Prompts of one length are equal; after them every token is sampled."""
    batch = micro_batch(LENGTHS)
    tokens, mask = batch.token_ids.copy(), np.zeros(batch.num_tokens, dtype=bool)
    for segment, prompt in enumerate(PROMPTS):
        (where,) = np.nonzero(batch.segment_ids == segment)
        tokens[where[:prompt]] = 3 + np.arange(prompt) * (prompt + 1) % 40
        mask[where[prompt:]] = True
    return replace(batch, token_ids=tokens, loss_mask=mask)


def test_a_prompt_is_kept_once(shared):
    distinct = Distinct.of(shared)
    tokens = list(zip(shared.token_ids, shared.position_ids, strict=True))
    assert [tokens[distinct.kept[place]] for place in distinct.place] == tokens
    again = sum(prompt for number, prompt in enumerate(PROMPTS) if prompt in PROMPTS[:number])
    assert len(distinct.kept) == sum(LENGTHS) - again == shared.num_tokens - np.count_nonzero(distinct.copy)
    assert distinct.copy.max() == 4, "of five answers to one prompt"
    sampled = np.flatnonzero(shared.loss_mask)
    assert len(set(distinct.place[sampled])) == len(sampled), "what was sampled is nobody else's"


def test_equal_answers_to_one_prompt_are_two(micro_batch):
    batch = micro_batch((8, 8), select=[0, 0])
    distinct = Distinct.of(batch)
    first = int(np.flatnonzero(batch.loss_mask)[0])
    assert len(distinct.kept) == 16 - first


@pytest.mark.parametrize("window", [None, 4])
def test_attention_is_that_of_whole_segments(shared, window):
    distinct, device = Distinct.of(shared), torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    size = (1, 2, len(distinct.kept), 8)
    computed = [torch.randn(size, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(3)]
    place = torch.from_numpy(distinct.place)
    whole = [each[:, :, place] for each in computed]
    plan = SegmentPlan.of(shared.position_ids, device)
    wanted = attend(torch.nn.Identity(), *whole, None, segments=plan, sliding_window=window)[0][0, distinct.kept]
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, generator=draw)
    expected = torch.autograd.grad(wanted, computed, cotangent)

    plan = SegmentPlan.of(shared.position_ids, device, distinct)
    got = attend(torch.nn.Identity(), *computed, None, segments=plan, sliding_window=window)[0][0]
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(got, computed, cotangent), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_what_is_read_twice_gets_both_gradients(shared):
    distinct = Distinct.of(shared)
    asked = np.flatnonzero(shared.position_ids)
    computed = torch.randn(len(distinct.kept), 3, dtype=torch.float64, requires_grad=True)
    read = Reading.of(distinct, asked - 1, torch.device("cpu"))(computed)
    cotangent = torch.randn_like(read)
    (wanted,) = torch.autograd.grad(computed[torch.from_numpy(distinct.place[asked - 1])], computed, cotangent)
    torch.testing.assert_close(torch.autograd.grad(read, computed, cotangent)[0], wanted)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_a_step_is_the_padded_one(name, model_path, shared):
    path = model_path(name)
    loss, logprobs, expected = padded_twin(path, shared)
    trainer = started(path)
    np.testing.assert_allclose(trainer.forward([shared])[0], logprobs, atol=2e-5)
    np.testing.assert_allclose(trainer.backward([shared], OBJECTIVE)[0].loss, loss, rtol=1e-4)
    got = gradients(trainer)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(got[parameter], gradient, rtol=1e-3, atol=2e-5, msg=parameter)


def test_values_are_those_of_each_rollout_alone(model_path, shared, micro_batch):
    trainer = started(model_path("qwen2"), head=Head.VALUE)
    with torch.no_grad():
        for parameter in trainer._worker.unwrapped.value_head.parameters():
            parameter.fill_(0.1)
    together = trainer.forward([shared])[0]
    for segment in range(shared.num_segments):
        inside = shared.segment_ids == segment
        columns = {name: value[inside] for name, value in vars_of(shared).items()}
        alone = replace(shared, **columns, segment_ids=np.zeros(inside.sum(), np.int32), num_segments=1)
        np.testing.assert_allclose(trainer.forward([alone])[0], together[inside], atol=1e-5)


def vars_of(batch):
    """The columns that it has, but for the segments."""
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__ if name != "segment_ids"}
    return {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
