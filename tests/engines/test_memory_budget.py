"""Tests that an engine's memory budget includes the memory for weight updates and for the largest steps."""

import json
from dataclasses import replace

import pytest

from pipelinerl.engines.memory_budget import DeviceMemory, budget_of, reserve_of
from pipelinerl.errors import ModelError
from pipelinerl.models.model_shape import read_shape
from trainer_contract.types import WeightDType

GIB = 2**30
#: Model configuration with the sizes of an 8B Llama.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPU = DeviceMemory(total=80 * GIB, free=69 * GIB, ours=11 * GIB)
RESERVE = 4 * GIB


@pytest.fixture
def budget(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shape = read_shape(tmp_path)
    bf16 = WeightDType.BFLOAT16
    return budget_of(shape, dtype=bf16, wire=bf16, slots=40, context=8192, received=2 * shape.count)


def test_kv_cache_gets_the_memory_left_by_the_staging_copy_and_workspaces(budget):
    assert budget.cache == 40 * GIB and budget.staging > 14 * GIB
    assert budget.cache_within(GPU, context_length=8192) == budget.cache
    crowded = replace(GPU, free=50 * GIB + RESERVE)
    assert budget.cache_within(crowded, context_length=8192) == 50 * GIB - (budget.total - budget.cache)
    with pytest.raises(ModelError, match=r"second copy of the weights 15,3.. MiB.*; no number of slots fits"):
        budget.cache_within(replace(GPU, free=17 * GIB + RESERVE), context_length=8192)


def test_error_about_memory_suggests_the_largest_number_of_slots_that_fits(budget):
    left = budget.least - budget.logits // 2
    most, each = budget.most_slots(left), budget.logits // budget.slots
    fixed = budget.least - budget.logits
    assert fixed + most * each <= left < fixed + (most + 1) * each
    with pytest.raises(ModelError, match=f"set engine.slots to {most} or less"):
        budget.cache_within(replace(GPU, free=left + RESERVE), context_length=8192)


def test_states_of_all_slots_are_reserved_before_the_cache(budget):
    recurrent = replace(budget, states=2 * GIB)
    crowded = replace(GPU, free=50 * GIB + RESERVE)
    expected = budget.cache_within(crowded, context_length=8192) - 2 * GIB
    assert recurrent.cache_within(crowded, context_length=8192) == expected
    assert recurrent.most_slots(recurrent.least) == recurrent.slots


def test_memory_share_setting_bounds_the_memory_that_the_engine_may_still_allocate(budget):
    half = replace(GPU, share=0.375)
    assert half.left == 19 * GIB - reserve_of(30 * GIB) == 35 * GIB // 2
    with pytest.raises(
        ModelError, match=r"17,920 MiB are left of the device's 81,920 MiB; .*raise engine\.memory_share"
    ):
        budget.cache_within(half, context_length=8192)
    assert replace(GPU, share=1.0, free=7 * GIB).left == 3 * GIB, "another process has taken the rest"


def test_memory_budget_includes_a_conversion_buffer_if_updates_arrive_in_another_dtype(tmp_path, budget):
    shape = read_shape(tmp_path)
    dtypes = {"dtype": WeightDType.BFLOAT16, "wire": WeightDType.FLOAT32}
    sent = budget_of(shape, **dtypes, slots=40, context=8192, received=2 * shape.count, spare=shape.count)
    assert sent.conversion == 4 * shape.count and budget.conversion == 0
    assert sent.staging == budget.staging + shape.count
    with pytest.raises(ModelError, match=r"set weights\.dtype to the engine's"):
        sent.cache_within(replace(GPU, free=40 * GIB + RESERVE), context_length=8192)
