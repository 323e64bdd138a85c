"""Attention within packed segments: compared with a loop over tokens, and the TPU kernel in its interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelinerl.plugins.jax.trainer import attention as jax_attention, mesh as jax_mesh
from pipelinerl.plugins.jax.trainer.attention import PADDING, PackedAttention, Rows
from pipelinerl.plugins.jax.trainer.mesh import MeshShape
from pipelinerl.rng import generator
from tests.fakes.jax_models import interpret
from tests.plugins.jax.trainer.test_segments import positions_of


def random_rows(lengths, *, heads, width, multiple=1, least_columns=64):
    draw = generator(0, "attention")
    rows = Rows.of(positions_of(lengths), multiple=multiple, least_columns=least_columns)
    arrays = [jnp.asarray(draw.normal(size=(*rows.shape, count, width)), jnp.float32) for count in heads]
    return arrays, jnp.asarray(rows.spread(np.repeat(np.arange(len(lengths)), lengths).astype(np.int32), fill=PADDING))


def mesh_of(**axes):
    shape = MeshShape(**axes)
    return jax_mesh.build(shape, jax.devices("cpu")[: shape.num_devices])


def plain_attention(query, key, value, ids):
    """Compute attention with a loop over tokens and heads, in float64."""
    tokens, heads, width = query.shape
    out = np.zeros_like(query)
    for t in range(tokens):
        seen = [s for s in range(t + 1) if ids[s] == ids[t]]
        for head in range(heads):
            of_key = head // (heads // key.shape[1])
            scores = key[seen, of_key] @ query[t, head] / np.sqrt(width)
            shares = np.exp(scores - scores.max())
            out[t, head] = shares / shares.sum() @ value[seen, of_key]
    return out


@pytest.mark.parametrize("at_once", [1024, 16])
def test_jax_attention_of_each_token_covers_only_tokens_of_its_own_segment(at_once, monkeypatch):
    monkeypatch.setattr(jax_attention, "_QUERIES_AT_ONCE", at_once)
    arrays, ids = random_rows((9, 40, 3, 25), heads=(4, 2, 2), width=8)
    attended, _ = jax.jit(PackedAttention.DENSE.within(ids, mesh_of()))(*arrays, None)
    query, key, value = (np.asarray(array, np.float64) for array in arrays)
    for row in range(len(ids)):
        expected = plain_attention(query[row], key[row], value[row], np.asarray(ids[row]))
        np.testing.assert_allclose(np.asarray(attended[row]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [pytest.param({}, marks=pytest.mark.slow), {"fsdp": 2, "tensor": 2}], ids=["one device", "rows and heads"]
)
def test_tpu_attention_kernel_in_interpret_mode_equals_dense_attention_in_value_and_gradient(axes, monkeypatch):
    interpret(monkeypatch)
    lengths, heads = (100, 28, 90, 3), (4, 2, 2)
    arrays, ids = random_rows(lengths, heads=heads, width=16, multiple=2 if axes else 1, least_columns=128)
    outward = jnp.asarray(generator(1, "attention").normal(size=arrays[0].shape), jnp.float32)

    def gradients(attention):
        attend = attention.within(ids, mesh_of(**axes))
        value, pull = jax.vjp(lambda *arrays: attend(*arrays, None)[0], *arrays)
        return value, *pull(outward)

    for ours, dense in zip(gradients(PackedAttention.SPLASH), gradients(PackedAttention.DENSE), strict=True):
        np.testing.assert_allclose(ours, dense, atol=5e-5)


def test_tpu_attention_kernel_is_chosen_only_for_bf16_on_a_tpu():
    assert PackedAttention.on("tpu", compute=jnp.bfloat16) is PackedAttention.SPLASH
    assert PackedAttention.on("tpu", compute=jnp.float32) is PackedAttention.DENSE
    assert PackedAttention.on("cpu", compute=jnp.bfloat16) is PackedAttention.DENSE
