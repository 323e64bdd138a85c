"""Attention of a decode step over the blocks of `PageCache`, as Triton kernels for CUDA.

`rotate_and_store` runs first: a program for each head of each row normalises and rotates the new query or key, and
writes keys and values to the cache. Separate operations would be several kernels in each layer, which take longer to
start than to run.

`attend_blocks` attends: a program attends with the queries of one row that share a key head, tile by tile, with a
running softmax in fp32 (FlashAttention 2, 2307.08691, algorithm 1). With few rows, a row's tiles are split among
several programs, whose results a second kernel joins (Flash-Decoding). Lengths and blocks are read from memory, so a
captured graph stays valid while sequences grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Number of tokens in a tile of the kernel; half as many for wide heads.
_TILE: Final = 64
#: The target number of kernel programs in a decode step: a few for each multiprocessor of the GPU.
_PROGRAMS: Final = 512
_MOST_SPLITS: Final = 32


def rotate_and_store(
    projected: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Store the keys and values of one new token per row in blocks [N, H, size, D]; return its queries [K, Hq, D].

    Args:
        projected: queries [K, Hq · D], keys and values [K, H · D]; each token's numbers are contiguous.
        table, positions: as in `attend_blocks`.
        cos, sin: f32 [context, D] by position; `sin` is negated in the first half.
        norms: weights [D] with which RMS norms scale queries and keys before the rotation.
    """
    queries, new_keys, new_values = projected
    _, heads, size, head_dim = keys.shape
    rows, q_heads = len(queries), queries.shape[1] // head_dim
    rotated = queries.new_empty((rows, q_heads, head_dim))
    _rotate_and_store[(rows, q_heads + 2 * heads)](
        queries,
        new_keys,
        new_values,
        rotated,
        keys,
        values,
        table,
        positions,
        cos,
        sin,
        *(norms or (cos, cos)),
        eps,
        queries.stride(0),
        new_keys.stride(0),
        new_values.stride(0),
        table.stride(0),
        Q_HEADS=q_heads,
        HEADS=heads,
        SIZE=size,
        WIDTH=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        NORMED=norms is not None,
        num_warps=1,
    )
    return rotated


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend with queries [K, Hq, D] over blocks [N, H, size, D] → [K, Hq, D].

    `table` i64 [K, n] lists each row's blocks in order. A row attends to the tokens up to its query's position, in
    `positions` i64 [K, 1], or to the last `window` of these.
    """
    rows, q_heads, head_dim = query.shape
    _, heads, size, _ = keys.shape
    group = q_heads // heads
    tile = _TILE if head_dim <= 128 else _TILE // 2
    splits = min(_MOST_SPLITS, max(1, _PROGRAMS // (rows * heads)), -(-table.shape[1] * size // tile))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    parts = out if splits == 1 else query.new_empty((rows, q_heads, splits, head_dim), dtype=torch.float32)
    weights = query.new_empty((rows, q_heads, splits), dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(head_dim))  # Triton's matrix product needs sizes of at least 16
    _attend[(rows, heads, splits)](
        query,
        keys,
        values,
        table,
        positions,
        parts,
        weights,
        scale,
        softcap or 0.0,
        window or 0,
        query.stride(0),
        query.stride(1),
        table.stride(0),
        HEADS=heads,
        GROUP=group,
        QUERIES=max(16, triton.next_power_of_2(group)),
        SIZE=size,
        WIDTH=head_dim,
        PADDED=padded,
        TILE=tile,
        SPLITS=splits,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
    )
    if splits > 1:
        _join[(rows * q_heads,)](
            parts, weights, out, WIDTH=head_dim, PADDED=padded, SPLITS=splits, ROOM=triton.next_power_of_2(splits)
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    queries,
    new_keys,
    new_values,
    rotated,
    keys,
    values,
    table,
    positions,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    query_row,
    key_row,
    value_row,
    table_row,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    NORMED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    across = tl.arange(0, PADDED)
    position = tl.load(positions + row)
    block = tl.load(table + row * table_row + position // SIZE)
    first_entry = block * HEADS * SIZE + position % SIZE
    cos += position * WIDTH
    sin += position * WIDTH
    if head < Q_HEADS:
        own = queries + row * query_row + head * WIDTH
        turned = _rotated(own, query_norm, cos, sin, eps, WIDTH, PADDED, NORMED)
        tl.store(rotated + (row * Q_HEADS + head) * WIDTH + across, turned, mask=across < WIDTH)
    elif head < Q_HEADS + HEADS:
        head -= Q_HEADS
        own = new_keys + row * key_row + head * WIDTH
        turned = _rotated(own, key_norm, cos, sin, eps, WIDTH, PADDED, NORMED)
        tl.store(keys + (first_entry + head * SIZE) * WIDTH + across, turned, mask=across < WIDTH)
    else:
        head -= Q_HEADS + HEADS
        value = tl.load(new_values + row * value_row + head * WIDTH + across, mask=across < WIDTH)
        tl.store(values + (first_entry + head * SIZE) * WIDTH + across, value, mask=across < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]
    own, norm, cos, sin, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, NORMED: tl.constexpr
):
    """Return a head's query or key, normalised and rotated, in the dtype of `own`."""
    across = tl.arange(0, PADDED)
    there, opposite = across < WIDTH, (across + WIDTH // 2) % WIDTH
    stored = tl.load(own + across, mask=there, other=0.0)
    x, turned = stored.to(tl.float32), tl.load(own + opposite, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        # as in `LlamaForward`, the norm rounds before it scales
        x = (x * scale).to(stored.dtype).to(tl.float32) * tl.load(norm + across, mask=there, other=0.0).to(tl.float32)
        turned = (turned * scale).to(stored.dtype).to(tl.float32)
        turned *= tl.load(norm + opposite, mask=there, other=0.0).to(tl.float32)
    x *= tl.load(cos + across, mask=there, other=0.0)
    return (x + turned * tl.load(sin + across, mask=there, other=0.0)).to(stored.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    positions,
    parts,
    weights,
    scale,
    softcap,
    window,
    query_row,
    query_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    begin, end = first // TILE, tl.cdiv(length, TILE)
    share = tl.cdiv(end - begin, SPLITS)
    begin += split * share
    end = tl.minimum(begin + share, end)
    member, across = tl.arange(0, QUERIES), tl.arange(0, PADDED)
    present = (member < GROUP)[:, None] & (across < WIDTH)[None, :]
    own = query + row * query_row + (head * GROUP + member)[:, None] * query_head + across[None, :]
    q = tl.load(own, mask=present, other=0.0)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        seen = token < length
        if WINDOWED:
            seen = seen & (token >= first)
        block = tl.load(table + row * table_row + token // SIZE, mask=seen, other=0)
        entry = (block * HEADS + head) * SIZE + token % SIZE
        there = seen[:, None] & (across < WIDTH)[None, :]
        k = tl.load(keys + entry[:, None] * WIDTH + across[None, :], mask=there, other=0.0)
        v = tl.load(values + entry[:, None] * WIDTH + across[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # equals softcap · tanh(scores / softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        faded, exps = tl.exp(most - larger), tl.exp(scores - larger[:, None])
        total = total * faded + tl.sum(exps, 1)
        sums = sums * faded[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
        most = larger
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # avoid 0 / 0 in a split without tiles
    place = ((row * HEADS + head) * GROUP + member) * SPLITS + split
    tl.store(parts + place[:, None] * WIDTH + across[None, :], sums.to(parts.dtype.element_ty), mask=present)
    if SPLITS > 1:
        tl.store(weights + place, most + tl.log(tl.where(total == 0.0, 1.0, total)), mask=member < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts, weights, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr
):
    query, split, across = tl.program_id(0), tl.arange(0, ROOM), tl.arange(0, PADDED)
    logs = tl.load(weights + query * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    shares = tl.exp(logs - tl.max(logs, 0))
    shares = shares / tl.sum(shares, 0)
    there = (split < SPLITS)[:, None] & (across < WIDTH)[None, :]
    each = tl.load(parts + (query * SPLITS + split)[:, None] * WIDTH + across[None, :], mask=there, other=0.0)
    joined = tl.sum(each * shares[:, None], 0)
    tl.store(out + query * WIDTH + across, joined.to(out.dtype.element_ty), mask=across < WIDTH)
