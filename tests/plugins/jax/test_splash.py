"""The splash kernel, interpreted, equals dense attention, skips blocks above the diagonal, and lowers to TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu
from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

from pipelinerl.plugins.jax import splash as jax_splash
from pipelinerl.plugins.jax.decoder import grouped_attention
from pipelinerl.plugins.jax.splash import block_sizes, causal_kernel, splash_attention
from pipelinerl.rng import generator
from tests.fakes.jax_models import interpret

ROW_OF_SEGMENTS = (np.arange(1024) >= 5).astype(np.int32) + (np.arange(1024) >= 130)


def arrays_of(rows, columns, heads, width, dtype=jnp.float32):
    draw = generator(0, "splash")
    return [jnp.asarray(draw.normal(size=(rows, columns, count, width)), dtype) for count in heads]


def dense(query, key, value, segment_ids):
    columns = query.shape[1]
    before = jnp.tril(jnp.ones((columns, columns), bool))
    return grouped_attention(query, key, value, before & (segment_ids[:, :, None] == segment_ids[:, None, :]))


def with_gradients(attend, arrays):
    outward = jnp.asarray(generator(1, "splash").normal(size=arrays[0].shape), arrays[0].dtype)
    value, pull = jax.vjp(attend, *arrays)
    return [value, *pull(outward)]


def agree(ours, theirs, tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.astype(jnp.float32), other.astype(jnp.float32), atol=tolerance, rtol=tolerance)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.mark.parametrize(
    ("columns", "heads", "width"),
    [(128, (4, 2, 2), 64), (512, (2, 1, 1), 128), pytest.param(1024, (2, 2, 2), 64, marks=pytest.mark.slow)],
)
def test_splash_attention_and_gradients_equal_dense_attention(columns, heads, width, interpreted):
    arrays = arrays_of(2, columns, heads, width)
    segments = jnp.asarray(np.stack([ROW_OF_SEGMENTS[:columns], np.where(np.arange(columns) < 90, 0, -1)]), jnp.int32)
    ours, theirs = (
        with_gradients(partial(attend, segment_ids=segments), arrays) for attend in (splash_attention, dense)
    )
    agree(ours, theirs, 5e-5)


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(1, id="separate backward kernels"),
        pytest.param(2, id="fused backward kernel", marks=pytest.mark.slow),
    ],
)
def test_splash_attention_over_several_blocks_equals_dense_attention_in_the_tpu_interpreter(most, monkeypatch):
    monkeypatch.setattr(jax_splash, "_BLOCK", 128)
    monkeypatch.setattr(jax_splash, "_MOST_PARTIAL_GRADIENTS", most)
    assert block_sizes(256).use_fused_bwd_kernel is (most == 2)
    arrays, segments = arrays_of(1, 256, (2, 1, 1), 64), jnp.asarray(ROW_OF_SEGMENTS[None, :256])

    def attend(query, key, value):
        query, key, value = (jnp.moveaxis(array[0], 0, 1) for array in (query * 64**-0.5, key, value))
        attended = causal_kernel(256, 2)(query, key, value, SegmentIds(segments[0], segments[0]))
        return jnp.moveaxis(attended, 0, 1)[None]

    with pallas_tpu.force_tpu_interpret_mode():
        ours = with_gradients(attend, arrays)
    agree(ours, with_gradients(partial(dense, segment_ids=segments), arrays), 5e-5)


@pytest.mark.slow
def test_splash_attention_in_bf16_is_close_to_dense_attention(interpreted):
    arrays, segments = arrays_of(1, 128, (2, 1, 1), 64, jnp.bfloat16), jnp.asarray(ROW_OF_SEGMENTS[None, :128])
    ours = with_gradients(partial(splash_attention, segment_ids=segments), arrays)
    wide = [array.astype(jnp.float32) for array in arrays]
    agree(ours, with_gradients(partial(dense, segment_ids=segments), wide), 0.05)


@pytest.mark.parametrize("columns", [1024, 4096])
def test_splash_attention_skips_blocks_above_the_diagonal(columns):
    kernel = causal_kernel(columns, 2)
    for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
        if info is not None:  # with a fused backward pass, the kernel of keys computes the gradient of queries, too
            computed = np.asarray(info.block_mask)[0] > 0
            assert np.array_equal(computed, np.tril(np.ones((columns // 512, columns // 512), bool)))


def test_splash_kernel_block_sizes_divide_the_row_length():
    for columns in (128, 256, 384, 512, 640, 1024, 32768):
        sizes = block_sizes(columns)
        assert columns % sizes.block_q == 0 and sizes.block_q % 128 == 0 and sizes.has_backward_blocks
    assert block_sizes(2048).use_fused_bwd_kernel and not block_sizes(4096).use_fused_bwd_kernel


def products(jaxpr):
    """Yield each matmul of a jaxpr and its nested parts, kernels included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize(("columns", "width"), [(128, 64), (4096, 128)])
def test_splash_kernel_lowers_to_tpus_and_multiplies_bf16_arrays_in_one_pass(columns, width):
    """Callers ask for exact products of fp32 arrays, which the TPU compiler rejects for bf16 arrays in a kernel."""

    def loss(*arrays):
        with jax.default_matmul_precision("float32"):
            return splash_attention(*arrays, jnp.zeros((2, columns), jnp.int32)).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((2, columns, heads, width), jnp.bfloat16) for heads in (4, 2, 2)]
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arrays)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2 + (columns > 2048)
    in_bf16 = [e for e in products(traced.jaxpr.jaxpr) if any(v.aval.dtype == jnp.bfloat16 for v in e.invars)]
    passes = {jax.lax.Precision(each) for e in in_bf16 for each in e.params["precision"] or (None,)}
    assert len(in_bf16) >= 6 and passes == {jax.lax.Precision.DEFAULT}
