"""`DecodeGraphs`: runs a decode step (forward pass and sampling) as a CUDA graph.

A step is hundreds of kernels of a few microseconds each, and the host takes longer to launch them than the device to
run them. A graph launches all kernels in one call. Its tensors have fixed addresses, so there is one graph for each
number of rows, rounded up, and for each of the two weight buffers. `capture_all` captures them in tens of milliseconds
each. Rows without a sequence write to the cache's spare block.

A step may start before the tokens of the step before it are on the host: these tokens are then fed on the device. So
two steps may be in flight, and each of them has its own pinned buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.page_cache import PageCache
from pipelinerl.engines.torch.sampling import StartedStep, sample_whole
from pipelinerl.engines.torch.weights import TorchWeights


class Inputs(NamedTuple):
    """Inputs of a step, all [B]: each row's next token, its position, its temperature and its noise.

    Next tokens that were sampled by the last step are a tensor on the device. `rows` are the rows that are fed, by
    default 0..B-1.
    """

    feeds: NDArray[Any] | Tensor
    positions: NDArray[Any]
    temperature: NDArray[np.float32]
    noise: NDArray[np.float64]
    rows: NDArray[np.int64] | None = None


class _Pinned:
    """The buffers of one step in page-locked memory: its inputs, its block table and its results."""

    def __init__(self, rows: int, blocks: int, spare: int) -> None:
        # Fp64 represents token ids and f32 values exactly.
        self.inputs = torch.zeros(
            (4, rows), dtype=torch.float64
        ).pin_memory()  # a row for each of the first four fields of `Inputs`
        self.table = torch.full((rows, blocks), spare, dtype=torch.int64).pin_memory()
        self.results = torch.zeros((2, rows), dtype=torch.float64).pin_memory()  # token ids and log-probs
        self.done = torch.cuda.Event()


class DecodeGraphs:
    """Graphs for at most `rows` rows. They share their memory, so only one runs at a time."""

    def __init__(self, forward: LlamaForward, cache: PageCache, weights: TorchWeights, *, rows: int) -> None:
        self._forward, self._cache, self._weights = forward, cache, weights
        self._rows = rows
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        blocks, device = cache.table.table.shape[1], cache.blocks(0)[0].device
        self._given = torch.zeros((4, rows), dtype=torch.float64, device=device)
        self._results = torch.zeros((2, rows), dtype=torch.float64, device=device)
        self._table = torch.full((rows, blocks), cache.spare, dtype=torch.int64, device=device)
        self._table_is_of: tuple[int, bytes] | None = None
        self._current, self._other = (_Pinned(rows, blocks, cache.spare) for _ in range(2))
        self._logits: Tensor | None = None

    def capture_all(self) -> None:
        """Capture all graphs before the first request; a later capture would wait for an update that is arriving."""
        self._weights.staging().zero_()  # a capture runs a step with these weights, of which any numbers will do
        sizes = {padded_rows(count, self._rows) for count in range(1, self._rows + 1)}
        for _ in range(2):
            for rows in sorted(sizes, reverse=True):  # smaller graphs reuse the memory of larger ones
                with torch.inference_mode():
                    self._graphs[self._weights.address, rows] = self._captured(rows)
            self._weights.swap()

    def run(self, inputs: Inputs) -> Tensor:
        """Start a step of rows 0..B-1; return its logits [B, V], which the next step overwrites."""
        count = len(inputs.positions)
        padded = padded_rows(count, self._rows)
        self._current, self._other = self._other, self._current
        self._current.done.synchronize()  # the device no longer reads these buffers
        self._update_table(np.arange(count) if inputs.rows is None else inputs.rows, padded)
        self._give(inputs, count, padded)
        key = self._weights.address, padded
        if key not in self._graphs:
            self._graphs[key] = self._captured(padded)
        self._graphs[key].replay()
        self._current.done.record()
        assert self._logits is not None, "a capture allocates them"
        return self._logits[:count]

    def sampled(self, count: int) -> StartedStep:
        """Return the step that `run` has started, as its graph samples it: without truncation or logit changes."""
        pinned = self._current
        pinned.results.copy_(self._results, non_blocking=True)
        pinned.done.record()

        def read() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            pinned.done.synchronize()
            token_ids, logprobs = pinned.results.numpy()[:, :count]
            return token_ids.astype(np.int64), logprobs.astype(np.float32)

        return StartedStep(self._results[0, :count], read)

    def _give(self, inputs: Inputs, count: int, padded: int) -> None:
        """Copy the inputs of `count` rows to the device; the other rows, up to `padded`, get zeros."""
        host = self._current.inputs.numpy()
        host[1:, :count] = inputs[1:4]
        host[:, count:padded] = 0
        if isinstance(inputs.feeds, Tensor):
            self._given[1:].copy_(self._current.inputs[1:], non_blocking=True)
            self._given[0, :count].copy_(inputs.feeds)
        else:
            host[0, :count] = inputs.feeds
            self._given.copy_(self._current.inputs, non_blocking=True)

    def _update_table(self, rows: NDArray[np.int64], padded: int) -> None:
        table, count = self._cache.table, len(rows)
        if self._table_is_of == (table.changes, rows.tobytes()):
            return
        used = max(1, int(table.counts[rows].max()))
        host = self._current.table.numpy()
        host[:count, :used] = table.table[rows, :used]
        host[count:padded, :used] = self._cache.spare
        self._table[:padded].copy_(self._current.table[:padded], non_blocking=True)
        self._table_is_of = table.changes, rows.tobytes()

    def _captured(self, rows: int) -> torch.cuda.CUDAGraph:
        """Capture a step of `rows` rows after one run, which compiles kernels and allocates workspaces."""
        logits = self._forward_of(rows)
        kept = self._logits = logits.new_empty((self._rows, logits.shape[1])) if self._logits is None else self._logits
        self._sample(rows)

        def step() -> None:
            kept[:rows].copy_(self._forward_of(rows))
            self._sample(rows)

        return capture(step, self._pool)

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


def capture(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Record the kernels that `step` would start; a replay of the result starts them all, in the memory of `pool`."""
    graph = torch.cuda.CUDAGraph()
    # Capture this thread's work only, because another thread may receive weights meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


def padded_rows(count: int, most: int) -> int:
    """Return the graph's number of rows for `count`: 2 (as torch compiles 1 apart), 4, 8, 16, or a multiple of 32."""
    padded = max(2, 1 << (count - 1).bit_length()) if count <= 32 else -(-count // 32) * 32
    return min(padded, most)
