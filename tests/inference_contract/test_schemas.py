"""The contract's requests are encoded as fixed JSON, and weight layouts are divided into buckets and shards."""

import itertools

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import DType, InitProcessGroupRequest, ParameterSpec, WeightLayout, WeightUpdateRequest

LAYOUT = WeightLayout(
    parameters=(
        ParameterSpec(name="embed.weight", shape=(4, 2), dtype=DType.FLOAT32),
        ParameterSpec(name="norm.weight", shape=(2,), dtype=DType.BFLOAT16),
    )
)


PREPARE = {"phase": "prepare", "version": 3}
LAYOUT_ID = "c5a1bf8730e75ed6a4db24815629bb27"
ONE, TWO, THREE = (f"http://10.0.0.{number}:8100" for number in (1, 2, 3))
PULL = {"transport": "pull", "layout_id": LAYOUT_ID, "digest": "d0"}


@pytest.mark.parametrize(
    ("fields", "encoded"),
    [
        (
            {"epoch": 1, "group": "weights", "generation": 2, "layout": LAYOUT},
            '"epoch":1,"transport":"broadcast","group":"weights","generation":2,'
            '"layout":{"parameters":[{"name":"embed.weight","shape":[4,2],"dtype":"float32"},'
            '{"name":"norm.weight","shape":[2],"dtype":"bfloat16"}]},"bucket_bytes":16777216,"on_update":"continue",',
        ),
        (
            {"epoch": 1, "sources": (ONE, TWO), **PULL},
            f'"epoch":1,"transport":"pull","sources":["{ONE}","{TWO}"],"layout_id":"{LAYOUT_ID}",'
            '"bucket_bytes":16777216,"on_update":"continue","digest":"d0",',
        ),
        (
            {"shards": ((ONE,), (TWO, THREE)), "bucket_bytes": 32, **PULL},
            f'"epoch":0,"transport":"pull","shards":[["{ONE}"],["{TWO}","{THREE}"]],"layout_id":"{LAYOUT_ID}",'
            '"bucket_bytes":32,"on_update":"continue","digest":"d0",',
        ),
    ],
    ids=["broadcast", "pull", "pull of shards"],
)
def test_prepare_request_is_encoded_as_the_golden_json(fields, encoded):
    request = WeightUpdateRequest(**PREPARE, **fields)
    expected = '{"phase":"prepare","version":3,' + encoded + '"timeout_s":120.0}'
    assert request.model_dump_json(exclude_none=True) == expected


def test_id_and_size_of_a_weight_layout_equal_the_golden_values():
    assert (LAYOUT.layout_id, LAYOUT.num_bytes) == (LAYOUT_ID, 36)
    assert LAYOUT.shards(2, 32) == [[(0, 32)], [(32, 36)]]


@pytest.mark.parametrize("connections", ["", '"connections":"tree",'], ids=["gloo's own", "tree"])
def test_process_group_request_is_encoded_as_the_golden_json(connections):
    text = (
        '{"group":"weights","backend":"gloo","rendezvous_host":"127.0.0.1","rendezvous_port":4711,"rank":1,'
        f'"world_size":3,"generation":5,{connections}"timeout_s":10.0}}'
    )
    assert InitProcessGroupRequest.model_validate_json(text).model_dump_json(exclude_none=True) == text


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (LAYOUT.parameters[:1], "parameter 'norm.weight' is missing"),
        ((*LAYOUT.parameters, ParameterSpec(name="x", shape=(1,), dtype=DType.INT8)), "'x' is not part of this model"),
        (LAYOUT.parameters[::-1], "the order differs"),
        ((LAYOUT.parameters[0].model_copy(update={"shape": (2, 4)}), LAYOUT.parameters[1]), "must have shape [4, 2]"),
        ((LAYOUT.parameters[0].model_copy(update={"dtype": DType.INT8}), LAYOUT.parameters[1]), "must have dtype"),
    ],
)
def test_difference_between_two_weight_layouts_names_the_first_mismatch(other, sentence):
    assert sentence in (LAYOUT.difference(WeightLayout(parameters=other)) or "")


def layout_of(sizes):
    rows = (ParameterSpec(name=str(row), shape=(size,), dtype=DType.INT8) for row, size in enumerate(sizes))
    return WeightLayout(parameters=tuple(rows))


def _gathered_one_by_one(sizes, bucket_bytes):
    """Return the buckets of a layout, computed parameter by parameter as the docstring of `buckets` says."""
    ranges, start, end = [], 0, 0
    for size in sizes:
        if end > start and end - start + size > bucket_bytes:
            ranges.append((start, end))
            start = end
        end += size
    return [*ranges, (start, end)] if end > start else ranges


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), bucket_bytes=st.integers(1, 120))
def test_weight_buckets_cover_all_bytes_once_without_splitting_parameters(sizes, bucket_bytes):
    layout = layout_of(sizes)
    buckets = layout.buckets(bucket_bytes)
    assert buckets[0][0] == 0 and buckets[-1][1] == layout.num_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(buckets))
    edges = {sum(sizes[:row]) for row in range(len(sizes) + 1)}
    assert all(start in edges and end in edges for start, end in buckets)
    assert buckets == _gathered_one_by_one(sizes, bucket_bytes)
    # A bucket may be larger than `bucket_bytes` only if it consists of a single parameter.
    for start, end in buckets:
        inside = [edge for edge in edges if start < edge < end]
        assert end - start <= bucket_bytes or not inside
    pieces = layout.pieces(bucket_bytes)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(pieces))
    assert {edge for bucket in buckets for edge in bucket} <= {edge for piece in pieces for edge in piece}
    assert pieces[-1][1] == layout.num_bytes and all(0 < end - start <= bucket_bytes for start, end in pieces)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any),
    bucket_bytes=st.integers(1, 60),
    count=st.integers(1, 5),
)
def test_weight_shards_are_balanced_and_consist_of_whole_buckets(sizes, bucket_bytes, count):
    layout = layout_of(sizes)
    shards = layout.shards(count, bucket_bytes)
    assert len(shards) == count
    covered = sorted(held for ranges in shards for held in ranges)
    assert covered[0][0] == 0 and covered[-1][1] == layout.num_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(covered))
    for ranges in shards:
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(ranges)), "adjacent ranges must be merged"
    buckets = layout.buckets(bucket_bytes)
    edges = {start for start, _ in buckets} | {layout.num_bytes}
    assert all(start in edges and end in edges for start, end in covered)
    filled = [sum(end - start for start, end in ranges) for ranges in shards]
    assert max(filled) - min(filled) <= max(end - start for start, end in buckets)
    assert layout.shards(1, bucket_bytes) == [[(0, layout.num_bytes)]]


@pytest.mark.parametrize(
    "fields",
    [
        PREPARE,
        PREPARE | {"layout_id": "a", "layout": LAYOUT.model_dump()},
        PREPARE | {"layout_id": "a"},
        PREPARE | {"layout_id": "a", "transport": "pull"},
        PREPARE | {"layout_id": "a", "transport": "pull", "sources": ["http://a:1"]},
        PREPARE | PULL | {"sources": []},
        PREPARE | PULL | {"sources": ["f/x"]},
        PREPARE | PULL | {"sources": ["http://a:1"], "shards": [["http://a:1"]]},
        PREPARE | PULL | {"shards": [[]]},
        {"phase": "commit", "version": 1},
        {"phase": "abort", "version": -1},
        {"phase": "abort", "version": 1, "unknown": 2},
    ],
)
def test_incomplete_or_invalid_weight_update_is_rejected(fields):
    with pytest.raises(ValidationError):
        WeightUpdateRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("temperature", 1e-38, "must be 0, which is greedy, or at least 1e-05, got 1e-38"),
        ("top_p", 1e-46, "greater than or equal to 0.000001"),
        ("top_k", 2**31, "less than or equal to 2147483647"),
        ("stop", "", "a stop string must not be empty"),
        ("stop", ["a", ""], "a stop string must not be empty"),
    ],
)
def test_unusable_sampling_values_are_rejected_by_name(name, value, sentence):
    with pytest.raises(ValidationError, match=sentence) as refused:
        ChatCompletionRequest.model_validate({"prompt_token_ids": [1], name: value})
    assert [error["loc"] for error in refused.value.errors()] == [(name,)]


@pytest.mark.parametrize(
    "changed", [{"logit_bias": {"1": 2.0}}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}]
)
def test_policy_logprobs_of_changed_logits_are_rejected(changed):
    with pytest.raises(ValidationError, match=f"the policy knows no {next(iter(changed))}; leave") as refused:
        ChatCompletionRequest.model_validate({"prompt_token_ids": [1], "policy_logprobs": True, **changed})
    assert [error["loc"] for error in refused.value.errors()] == [("policy_logprobs",)]
    truncated = {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "policy_logprobs": True}
    assert ChatCompletionRequest.model_validate({"prompt_token_ids": [1], **truncated}).policy_logprobs


def test_extreme_valid_sampling_values_are_accepted():
    for temperature in (0.0, 1e-5, 100.0):
        ChatCompletionRequest(prompt_token_ids=[1], temperature=temperature, top_p=1e-6, top_k=2**31 - 1, stop=[])
