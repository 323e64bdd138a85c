"""`TorchRunner`: a `ModelRunner` for any Hugging Face causal language model, on CPU or CUDA.

The model's forward comes from `engines.torch.forward`; attention and cache are this project's. Each row's next token
and sampling parameters are in a `RowTable` on the host; on the CPU the model reads it in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inference_contract.weights import WeightLayout
from pipelinerl.engines.batching.model_runner import Prefill, RowState, RowTable
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.engines.memory_budget import PREFILL_TOKENS
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.forward import ForwardKind, forward_of
from pipelinerl.engines.torch.quantized import QuantizedWeights
from pipelinerl.engines.torch.row_cache import AlikeRows, CacheShape, RowBeginnings, RowCache
from pipelinerl.engines.torch.sampling import add_to_logits, sample
from pipelinerl.engines.torch.weights import TorchWeights
from pipelinerl.enums import WeightFormat
from pipelinerl.models import torch_routers
from trainer_contract.types import Experts

_NO_TOP: Final[Mapping[int, TopTokens]] = MappingProxyType({})


@final
class TorchRunner:
    """A model with its cache and sampler.

    Args:
        model: from `load_for_decoding`; its parameters belong to the runner from now on.
        options: the number of rows, their length, and the storage format of linear layers.
        prefill_tokens: most padded tokens of one prefill forward; a longer prompt runs alone.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        forward: ForwardKind = ForwardKind.AUTO,
    ) -> None:
        config: Any = model.config
        text = config.get_text_config()
        self.slots = options.slots
        self.context_length = options.context_length
        self.vocab_size = int(text.vocab_size)
        parameter = next(model.parameters())
        self._device = parameter.device
        native = options.weights is WeightFormat.NATIVE
        self._weights = TorchWeights(model) if native else QuantizedWeights(model, options.weights)
        self._forward = forward_of(model, forward, context_length=options.context_length)
        routing = torch_routers.shape_of(model)
        self.route_log = None if routing is None else torch_routers.TorchRouteLog(model, routing)
        shape = CacheShape.of(text, options)
        self._cache = RowCache(shape, dtype=parameter.dtype, device=self._device)
        self._cache_bytes = shape.num_bytes(parameter.dtype)
        self._prefill_tokens = prefill_tokens
        self._rows = RowTable(options.slots)
        self.top_logprobs = _NO_TOP
        self._beginnings = RowBeginnings(options.slots)
        # Only on CPU: a GPU takes as long to read its weights for one row as for all, so computing fewer rows saves
        # nothing.
        self._alike = AlikeRows(options.slots) if self._device.type == "cpu" else None

    @property
    def layout(self) -> WeightLayout:
        """The parameters in the order of their bytes in `staging`."""
        return self._weights.layout

    @property
    def spare_bytes(self) -> int:
        """The size of the quantised weights that will not serve, from the first update on; 0 if none are quantised."""
        return self._weights.spare_bytes

    @property
    def cache_bytes(self) -> int:
        """The size of the cache of all rows at their full length."""
        return self._cache_bytes

    # --- rows ----------------------------------------------------------------------------------------------------

    def place(self, states: Sequence[RowState]) -> None:
        """Set the next token and the sampling parameters of the named rows."""
        self._rows.place(states)
        self._begin([state.row for state in states if state.position == 0])  # rows without a prefill

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move whole rows; no row is both a source and a target."""
        length = self._rows.move(sources, targets)
        self._cache.copy(sources, targets, length)
        self._beginnings.copy(sources, targets, length)
        if self._alike is not None:
            self._alike.move(sources, targets)

    @torch.inference_mode()
    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of the cache of row `source` to each of `rows`."""
        sources = [source] * len(rows)
        self._cache.copy(sources, rows, num_tokens)
        self._beginnings.copy(sources, rows, num_tokens)
        self._begin(rows)

    # --- forward -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of the named rows, batching prompts of similar length after their cached beginnings."""
        if self.route_log is not None and self.route_log.is_on:  # needs every token: no cache reuse
            self._prefill_told(prefills, self.route_log)
            return
        waiting = list(prefills)
        while waiting:
            after = self._beginnings.next_of(waiting)
            if after.start:
                sources = [
                    source for source, each in zip(after.sources, after.prefills, strict=True) for _ in each.rows
                ]
                self._cache.copy(sources, [row for each in after.prefills for row in each.rows], after.start)
            for batch in _batches(after.prefills, self._prefill_tokens, after.start):
                self._fill(batch, after.start)

    def _prefill_told(self, prefills: Sequence[Prefill], log: torch_routers.TorchRouteLog) -> None:
        """Prefill without reusing the cache, and record the routing of each prompt in `log`."""
        routed: dict[int, Experts] = {}
        for batch in _batches(prefills, self._prefill_tokens):
            length = self._fill(batch)
            of_prompts = log.take().reshape(len(batch), length, *log.shape[::2])
            routed |= {id(each): of[: len(each.token_ids)] for each, of in zip(batch, of_prompts, strict=True)}
        log.prefilled = [routed[id(each)] for each in prefills]

    def _fill(self, batch: Sequence[Prefill], start: int = 0) -> int:
        """Compute the prompts together from position `start`; return the number of tokens of each, with padding."""
        length = max(len(prefill.token_ids) for prefill in batch) - start
        token_ids = np.zeros((len(batch), length), dtype=np.int64)
        for index, prefill in enumerate(batch):
            token_ids[index, : len(prefill.token_ids) - start] = prefill.token_ids[start:]
            self._beginnings.note(prefill.rows, prefill.token_ids)
            self._begin(prefill.rows)
        positions = torch.arange(start, start + length, device=self._device)[None, :].expand(len(batch), -1)
        plan = self._cache.plan_prefill([prefill.rows for prefill in batch], start, length)
        self._forward.fill(self._on_device(token_ids), positions, self._cache, plan)
        return length

    def warm_up(self) -> None:
        """Run each kind of forward once, so that an unsupported model fails at load time and not in service.

        Raises:
            ModelError: the architecture needs a feature that the attention or the cache does not support.
        """
        self.prefill([Prefill([0, 0], [0])])
        self.place([RowState(0, 0, 2, 0, temperature=1.0, top_p=1.0, top_k=0)])
        self.decode(1)

    @torch.inference_mode()
    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step of rows 0..num_rows-1."""
        rows, used = self._rows, slice(0, num_rows)
        feeds, positions = rows.feeds[used], rows.positions[used]
        alike = None if self._alike is None else self._alike.step(feeds, positions)
        plan = self._cache.plan_decode(positions, alike)
        fed = self._on_device((feeds if alike is None else feeds[alike.first])[:, None])
        logits = plan.to_rows(self._forward.logits(fed, plan.fed_positions, self._cache, plan))
        if rows.any_change:
            logits = add_to_logits(logits, rows.changes)
        token_ids, logprobs, top_ids, top_logprobs = sample(
            logits,
            temperature=torch.from_numpy(rows.temperature[used]),
            top_k=torch.from_numpy(rows.top_k[used]),
            top_p=torch.from_numpy(rows.top_p[used]),
            noise=torch.from_numpy(rows.noise(used)),
            min_p=torch.from_numpy(rows.min_p[used]) if rows.any_min_p else None,
            most_top=rows.most_top,
        )
        self.top_logprobs = _NO_TOP
        if top_ids is not None and top_logprobs is not None:
            self.top_logprobs = rows.top_of(top_ids.cpu().numpy(), top_logprobs.cpu().numpy())
        if self.route_log is not None and self.route_log.is_on:
            routed = self.route_log.take()
            self.route_log.decoded = routed if alike is None else routed[alike.of_row]
        sampled = token_ids.cpu()
        rows.advance(used, sampled.numpy())
        return sampled.tolist(), logprobs.tolist()

    def _begin(self, rows: Sequence[int]) -> None:
        """Record that these rows hold the same tokens as one another."""
        if self._alike is not None:
            self._alike.begin(rows)

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # --- weights -------------------------------------------------------------------------------------------------

    def staging(self) -> Tensor:
        """Return the buffer for the next weights: uint8 [layout.num_bytes], on the model's device."""
        return self._weights.staging()

    def finish_staging(self) -> None:
        """Quantise the staged weights, if weights are served quantised."""
        self._weights.finish_staging()

    def swap(self) -> None:
        """Make the staged weights current."""
        self._weights.swap()
        self._beginnings.forget()


def _batches(prefills: Sequence[Prefill], limit: int, start: int = 0) -> Iterator[list[Prefill]]:
    """Yield batches of prefills of similar length, each of at most `limit` padded tokens after position `start`."""
    batch: list[Prefill] = []
    for prefill in sorted(prefills, key=lambda each: len(each.token_ids)):
        if batch and (len(prefill.token_ids) - start) * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(prefill)
    if batch:
        yield batch
