"""`DecodeGraphs`: runs a decode step (forward pass and sampling) as a CUDA graph.

A step is hundreds of kernels of a few microseconds each, and the host takes longer to launch them than the device to
run them. A graph launches all kernels, and the copies of inputs and results, in one call. Its tensors have fixed
addresses, so there is one graph for each number of rows, rounded up, and for each of the two weight buffers; each is
captured on first use, in tens of milliseconds. Rows without a sequence write to the cache's spare block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.page_cache import PageCache
from pipelinerl.engines.torch.sampling import sample_whole
from pipelinerl.engines.torch.weights import TorchWeights


class Inputs(NamedTuple):
    """Inputs of a step, all [B]: each row's next token, its position, its temperature and its noise."""

    feeds: NDArray[Any]
    positions: NDArray[Any]
    temperature: NDArray[np.float32]
    noise: NDArray[np.float64]


@final
class DecodeGraphs:
    """Graphs for at most `rows` rows. They share their memory, so only one runs at a time."""

    def __init__(self, forward: LlamaForward, cache: PageCache, weights: TorchWeights, *, rows: int) -> None:
        self._forward, self._cache, self._weights = forward, cache, weights
        self._rows = rows
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._host, self._given = _pinned(4, rows), _on_device(4, rows)  # a row for each field of `Inputs`
        self._answers, self._results = _pinned(2, rows), _on_device(2, rows)  # one row for token ids, one for log-probs
        blocks = cache.table.table.shape[1]
        self._table = torch.full((rows, blocks), cache.spare, dtype=torch.int64, device="cuda")
        self._table_is_of: tuple[int, int] | None = None
        self._logits: Tensor | None = None

    def run(self, inputs: Inputs) -> Tensor:
        """Run a step of rows 0..B-1; return logits [B, V], valid until the next step overwrites them."""
        count = len(inputs.feeds)
        padded = padded_rows(count, self._rows)
        host = self._host.numpy()
        host[:, :count] = inputs
        host[:, count:padded] = 0
        self._update_table(count)
        key = self._weights.address, padded
        if key not in self._graphs:
            self._graphs[key] = self._captured(padded)
        self._graphs[key].replay()
        assert self._logits is not None, "a capture allocates them"
        return self._logits[:count]

    def sampled(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the token ids [count] and the log-probs of the last step; valid only for rows without truncation."""
        torch.cuda.current_stream().synchronize()
        token_ids, logprobs = self._answers.numpy()[:, :count]
        return token_ids.astype(np.int64), logprobs.astype(np.float32)

    def _update_table(self, count: int) -> None:
        table = self._cache.table
        if self._table_is_of == (table.changes, count):
            return
        used = max(1, int(table.counts[:count].max()))
        blocks = np.full((self._rows, used), self._cache.spare, dtype=np.int64)
        blocks[:count] = table.table[:count, :used]
        self._table[:, :used] = torch.from_numpy(blocks).to(self._table.device)
        self._table_is_of = table.changes, count

    def _captured(self, rows: int) -> torch.cuda.CUDAGraph:
        """Capture a step of `rows` rows after one run, which compiles kernels and allocates workspaces."""
        self._given.copy_(self._host, non_blocking=True)
        logits = self._forward_of(rows)
        if self._logits is None:
            self._logits = logits.new_empty((self._rows, logits.shape[1]))
        self._sample(rows)
        graph = torch.cuda.CUDAGraph()
        # Capture this thread's work only, because another thread may receive weights meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._given.copy_(self._host, non_blocking=True)
            self._logits[:rows].copy_(self._forward_of(rows))
            self._sample(rows)
            self._answers.copy_(self._results, non_blocking=True)
        return graph

    def _forward_of(self, rows: int) -> Tensor:
        tokens, positions = self._given[:2, :rows].long()[:, :, None]
        plan = self._cache.plan_on_device(positions, self._table[:rows])
        return self._forward.logits(tokens, positions, self._cache, plan)

    def _sample(self, rows: int) -> None:
        assert self._logits is not None, "a capture allocates them"
        temperature, noise = self._given[2:, :rows]
        drawn = sample_whole(self._logits[:rows], temperature=temperature, noise=noise)
        self._results[0, :rows] = drawn.token_ids
        self._results[1, :rows] = drawn.logprobs


def padded_rows(count: int, most: int) -> int:
    """Return the number of rows of the graph for `count` rows: a power of two from 2 to 32, then a multiple of 32. The
    minimum is 2, because torch compiles a single row separately.
    """
    padded = max(2, 1 << (count - 1).bit_length()) if count <= 32 else -(-count // 32) * 32
    return min(padded, most)


def _pinned(fields: int, rows: int) -> Tensor:
    # Fp64 represents token ids and f32 values exactly.
    return torch.zeros((fields, rows), dtype=torch.float64, pin_memory=True)


def _on_device(fields: int, rows: int) -> Tensor:
    return torch.zeros((fields, rows), dtype=torch.float64, device="cuda")
