"""The kernels of paged attention give the same results as their definitions."""

import pytest
import torch

pytest.importorskip("triton", reason="triton exists for Linux alone")
from pipelinerl.engines.torch.paged_attention import attend_blocks, rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 5.0)])
@pytest.mark.parametrize(
    ("rows", "q_heads", "heads", "width", "size", "blocks"),
    [(3, 4, 2, 8, 32, 5), (2, 14, 2, 64, 32, 9), (5, 8, 8, 80, 16, 3), (2, 16, 1, 128, 64, 4), (1, 8, 2, 256, 32, 6)],
)
def test_paged_attention_kernel_equals_attention_by_definition(
    rows, q_heads, heads, width, size, blocks, window, softcap
):
    """Rows have one token, whole blocks, or any length. The dtype is fp32, and on a GPU also bf16."""
    draw = torch.Generator().manual_seed(rows)
    keys, values = (torch.randn(rows * blocks + 3, heads, size, width, generator=draw) for _ in range(2))
    query = torch.randn(rows, q_heads, width, generator=draw)
    table = torch.randperm(len(keys), generator=draw)[: rows * blocks].view(rows, blocks)
    positions = torch.randint(0, blocks * size, (rows, 1), generator=draw)
    positions[0], positions[-1] = 0, blocks * size - 1
    scale = width**-0.5
    for dtype, within in [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)][: 1 + (DEVICE.type == "cuda")]:
        given = [each.to(DEVICE, dtype) for each in (query, keys, values)]
        result = attend_blocks(
            *given, table.to(DEVICE), positions.to(DEVICE), window=window, scale=scale, softcap=softcap
        )
        expected = _attended(*(each.double().cpu() for each in given), table, positions, window, scale, softcap)
        torch.testing.assert_close(result.double().cpu(), expected, atol=within, rtol=0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "q_heads", "heads", "width"), [(3, 4, 2, 8), (2, 14, 2, 64), (5, 8, 8, 80)])
def test_kernel_applies_rotary_embeddings_and_stores_keys_and_values_in_their_cache_blocks(
    rows, q_heads, heads, width, normed
):
    """Nothing else in the cache changes. Queries, keys and values are parts of one product, in fp32 or bf16."""
    size, blocks = 16, 3
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        draw = torch.Generator().manual_seed(rows)
        product = torch.randn(rows, (q_heads + 2 * heads) * width, generator=draw).to(DEVICE, dtype)
        projected = product.split([q_heads * width, heads * width, heads * width], dim=-1)
        keys, values = (
            torch.randn(rows * blocks + 3, heads, size, width, generator=draw).to(DEVICE, dtype) for _ in range(2)
        )
        before = keys.clone(), values.clone()
        table = torch.randperm(len(keys), generator=draw)[: rows * blocks].view(rows, blocks).to(DEVICE)
        positions = torch.randint(0, blocks * size, (rows, 1), generator=draw).to(DEVICE)
        angles = torch.randn(blocks * size, width // 2, generator=draw).to(DEVICE)
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
        norms = (torch.rand(2, width, generator=draw) + 0.5).to(DEVICE, dtype).unbind() if normed else None
        queries = rotate_and_store(projected, keys, values, table, positions, cos=cos, sin=sin, norms=norms, eps=1e-6)
        for row, position in enumerate(positions[:, 0].tolist()):
            where = table[row, position // size], slice(None), position % size
            angle = cos[position], sin[position]
            for actual, part, norm in ((queries[row], 0, 0), (keys[where], 1, 1)):
                expected = _rotated(projected[part][row].view(-1, width), norms and norms[norm], *angle)
                torch.testing.assert_close(actual.float(), expected, atol=within, rtol=within)
            assert torch.equal(values[where], projected[2][row].view(-1, width))
            before[0][where], before[1][where] = keys[where], values[where]
        assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def _rotated(x, norm, cos, sin):
    x, half = x.float(), x.shape[-1] // 2
    if norm is not None:
        x = x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * norm.float()
    return x * cos + torch.cat((x[..., half:], x[..., :half]), dim=-1) * sin


def _attended(query, keys, values, table, positions, window, scale, softcap):
    results = []
    for row, own in enumerate(table):
        length = int(positions[row]) + 1
        key, value = (
            each[own].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(query.shape[1] // each.shape[1], 0)
            for each in (keys, values)
        )
        scores = torch.einsum("hd,hnd->hn", query[row], key) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if window is not None:
            scores[:, : max(0, length - window)] = -torch.inf
        results.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), value))
    return torch.stack(results)
