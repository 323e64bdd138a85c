"""`TorchRunner`: a `ModelRunner` for any Hugging Face causal language model, on CPU or CUDA.

The forward comes from `engines.torch.forward`. Each row's next token and sampling parameters are in a `RowTable` on the
host; on the CPU the model reads it in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inference_contract.weights import WeightLayout
from pipelinerl.engines.batching.model_runner import (
    NOTHING_FURTHER,
    EarlyStep,
    FurtherToken,
    Prefill,
    RowState,
    RowTable,
)
from pipelinerl.engines.batching.sample_loop import CacheRoom
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.engines.memory_budget import PREFILL_TOKENS, window_blocks
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.attention import reading_for
from pipelinerl.engines.torch.blocks import AlikeRows, BlockTable, PromptStates, tokens_of
from pipelinerl.engines.torch.decode_graphs import DecodeGraphs, Inputs
from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.forward import ModuleForward
from pipelinerl.engines.torch.page_cache import CacheReading, CacheShape, PageCache
from pipelinerl.engines.torch.quantized import QuantizedWeights
from pipelinerl.engines.torch.sampling import StartedStep, add_to_logits, sample
from pipelinerl.engines.torch.speculation import OPTION, Drafter, Drafts, length_of
from pipelinerl.engines.torch.weights import TorchWeights
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.models import torch_routers
from trainer_contract.types import Experts, Kernels

#: Number of positions whose log-probs are computed at a time, in fp32 [positions, vocabulary].
_SCORED_AT_ONCE: Final = 256
#: The least size of the weights, in bytes, at which a GPU's engine compiles the forward, which takes 15 s.
_COMPILED_FROM: Final = 2 * 10**8

_NO_TOP: Final[Mapping[int, TopTokens]] = MappingProxyType({})


class TorchRunner:
    """A model with its cache and sampler.

    Args:
        model: from `load_for_decoding`; its parameters belong to the runner from now on.
        weights: the model's weights, from `served_weights`; None creates them.
        shape: the shape of the model's cache; None learns it by a forward.
        cache_bytes: most memory for keys and values; None allows room for the whole context in all rows. If it is too
            little for one row, the constructor raises `ModelError`.
        starts_early: True starts a step before the previous step's tokens are on the host, wherever the loop allows it;
            None does so only with CUDA graphs, because without them it saves no time.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        *,
        weights: TorchWeights | QuantizedWeights | None = None,
        shape: CacheShape | None = None,
        cache_bytes: int | None = None,
        starts_early: bool | None = None,
    ) -> None:
        config: Any = model.config
        text = config.get_text_config()
        self.slots = options.slots
        self.context_length = options.context_length
        self.vocab_size = int(text.vocab_size)
        self._model = model
        parameter = next(model.parameters())
        self._device = parameter.device
        self._weights = weights or served_weights(model, options.weights)
        self._forward: LlamaForward | ModuleForward = (
            LlamaForward(model, context_length=options.context_length, kernels=options.kernels)
            if LlamaForward.fits(model)
            else ModuleForward(model)
        )
        routing = torch_routers.shape_of(model)
        self.route_log = None if routing is None else torch_routers.TorchRouteLog(model, routing)
        shape = cache_shape_of(model, options) if shape is None else shape
        self._block_bytes, self._state_bytes = shape.block_bytes, 2 * options.slots * shape.state_bytes
        drafted = length_of(options.options)
        if drafted and shape.states:
            raise ModelError(
                f"{type(model).__name__} has recurrent states, which cannot return to the token before a rejected "
                f"draft; leave out engine.options.{OPTION}"
            )
        self.most_fed = options.slots * (1 + drafted)
        """The most tokens that a step feeds."""
        self._drafter = Drafter(options.slots, drafted) if drafted else None
        self._slot_bytes, window = shape.slot_bytes, shape.window
        blocks, slots = options.cache_room(
            shape.size, self._block_bytes, allowed=cache_bytes, window=window, slot_bytes=self._slot_bytes
        )
        self._table = BlockTable(
            rows=options.slots,
            context=options.context_length,
            blocks=blocks,
            size=shape.size,
            keeps_few=self._device.type == "cpu",
            window=window,
            slots=slots,
        )
        self._in_window = window_blocks(options.context_length, window, shape.size)
        reading = reading_for(self._device, parameter.dtype, options.kernels)
        self._cache = PageCache(shape, self._table, device=self._device, reading=reading)
        self._prompts = PromptStates(self._table) if shape.states else None
        self._graphs: DecodeGraphs | None = None
        if (
            self._device.type == "cuda"
            and isinstance(self._forward, LlamaForward)
            and isinstance(self._weights, TorchWeights)
            and self._cache.reading is CacheReading.KERNEL
        ):
            self._graphs = DecodeGraphs(self._forward, self._cache, self._weights, rows=self.most_fed)
            if self.layout.num_bytes >= _COMPILED_FROM:
                self._forward.compile()
        # A step that is started early may be discarded, but states cannot go back. Drafts need the last step's tokens.
        if shape.states or drafted:
            starts_early = False
        elif starts_early is None:
            starts_early = self._graphs is not None
        self.early_step = EarlyStep(options.slots, is_used=starts_early)
        self._rows = RowTable(options.slots)
        self.top_logprobs = _NO_TOP
        self.further: Mapping[int, Sequence[FurtherToken]] = NOTHING_FURTHER
        self._all_rows = np.arange(options.slots)
        # Merging equal rows saves time only on a CPU: a GPU takes as long to read its weights for one row as for all.
        # It needs the tokens on the host, so it excludes steps that start early.
        merges = self._device.type == "cpu" and not (starts_early or drafted or shape.states)
        self._alike = AlikeRows(options.slots) if merges else None

    @property
    def layout(self) -> WeightLayout:
        return self._weights.layout

    @property
    def cache_bytes(self) -> int:
        """The most memory that keys, values and states take."""
        windows = self._table.windows
        slots = 0 if windows is None else windows.num_slots
        return self._table.num_blocks * self._block_bytes + slots * self._slot_bytes + self._state_bytes

    @property
    def room(self) -> CacheRoom:
        table, windows = self._table, self._table.windows
        return CacheRoom(
            blocks=table.num_blocks,
            free=table.free,
            size=table.size,
            reused_tokens=table.reused_tokens,
            # A prefill also reads the last window of the prefix that it reuses.
            most_slots=None if windows is None else 2 * self._in_window,
            free_slots=0 if windows is None else windows.free,
        )

    # --- rows ----------------------------------------------------------------------------------------------------

    def place(self, states: Sequence[RowState]) -> None:
        self.early_step.drop()
        self._rows.place(states)
        # a prompt of one token has no prefill in which its row would begin
        begun = [state.row for state in states if state.position == 0]
        self._begin(begun)
        if self._prompts is not None:
            self._cache.clear_states(begun)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` to rows `targets`, pairwise, with all state; no row is in both. No block is copied."""
        self._rows.move(sources, targets)
        self.early_step.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._table.release(target, 0)
            self._table.move(source, target)
        if self._alike is not None:
            self._alike.move(sources, targets)
        if self._drafter is not None:
            self._drafter.move(sources, targets)
        if self._prompts is not None:
            self._cache.copy_states(sources, targets)
            self._prompts.move(sources, targets)

    def reserve(self, num_rows: int) -> bool:
        """Give rows 0..num_rows-1 a block for their next token; return False if the blocks run out."""
        return self._table.grow(self._rows.positions[:num_rows])

    def release(self, rows: Sequence[int]) -> None:
        """Free the blocks of `rows`; full ones are kept for later prompts as long as there is room."""
        for row in rows:
            self._table.release(row, int(self._rows.positions[row]))
        if self._prompts is not None:
            self._prompts.forget(rows)

    @torch.inference_mode()
    def clear(self, rows: Sequence[int]) -> None:
        """Set the blocks that only `rows` use to zero; remove all their blocks from the index of reusable blocks."""
        self.early_step.drop()
        self._cache.clear(self._table.spoil(rows))
        if self._prompts is not None:
            self._prompts.forget(rows)

    def survives(self, error: Exception) -> bool:
        """Return True except for CUDA's errors: all but a lack of memory leave the context unusable."""
        cuda_failed = self._device.type == "cuda" and isinstance(error, RuntimeError)
        return not cuda_failed or isinstance(error, torch.OutOfMemoryError)

    @torch.inference_mode()
    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Give `rows` the first `num_tokens` of the cache of row `source`; only the last block is copied."""
        # The states of `source` are those of its last token, and its windows may have given back the prompt's end.
        if self._prompts is not None or not self._table.can_fork(source, num_tokens):
            self.prefill([Prefill(self._table.tokens[source, :num_tokens].tolist(), rows)])
            return
        self.early_step.drop()
        self.release([row for row in rows if self._table.counts[row]])
        self._fork(source, rows, num_tokens)

    def _fork(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        self._cache.copy(self._table.fork(source, rows, num_tokens))
        self._rows.positions[list(rows)] = num_tokens
        self._begin(rows)

    # --- forward -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of `prefills` in batches of similar lengths; a prompt waits for a prefix that another has."""
        self.early_step.drop()
        self.release([row for prefill in prefills for row in prefill.rows if self._table.counts[row]])
        log = self.route_log if self.route_log is not None and self.route_log.is_on else None
        if log is not None:  # compute all tokens, without cache reuse, because the routing of each one is needed
            self._prefill_recorded(prefills, log)
            return
        if self._prompts is not None:
            self._prefill_states(prefills, self._prompts)
            return
        waiting = [(prefill, tokens_of(prefill.token_ids)) for prefill in prefills]
        while waiting:
            by_start: dict[int, list[Prefill]] = {}
            later, being_computed = [], set[int]()
            for prefill, tokens in waiting:
                if not being_computed.isdisjoint(self._table.find(tokens)):
                    later.append((prefill, tokens))
                    continue
                start = self._begin_prompt(prefill, tokens)
                first, size = prefill.rows[0], self._table.size
                being_computed.update(self._table.table[first, start // size : len(tokens) // size].tolist())
                if start < len(tokens):
                    by_start.setdefault(start, []).append(prefill)
            for start, batch in by_start.items():
                for part in _batches(batch, start):
                    self._fill(part, start)
            waiting = later

    def _prefill_recorded(self, prefills: Sequence[Prefill], log: torch_routers.TorchRouteLog) -> None:
        for prefill in prefills:
            self._begin_prompt(prefill, tokens_of(prefill.token_ids), reuses=False)
        routed: dict[int, Experts] = {}
        for batch in _batches(prefills, pads=self._prompts is None):
            length = self._fill(batch)
            of_prompts = log.take().reshape(len(batch), length, *log.shape[::2])
            routed |= {id(each): of[: len(each.token_ids)] for each, of in zip(batch, of_prompts, strict=True)}
        log.prefilled = [routed[id(each)] for each in prefills]

    def _prefill_states(self, prefills: Sequence[Prefill], prompts: PromptStates) -> None:
        """Compute each distinct prompt once, whole; use the states of a running row that has the same prompt."""
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for prefill in prefills:
            rows_of.setdefault(tuple(prefill.token_ids), []).extend(prefill.rows)
        fresh = []
        for token_ids, rows in rows_of.items():
            source = prompts.find(tokens_of(token_ids))
            if source is None:
                fresh.append(Prefill(token_ids, rows))
                continue
            self._fork(source, rows, len(token_ids))
            self._cache.copy_states([prompts.join(source, rows)] * len(rows), rows)
        for batch in _batches(fresh, pads=False):
            for prefill in batch:
                self._begin_prompt(prefill, tokens_of(prefill.token_ids), reuses=False)
            self._fill(batch)

    def _begin_prompt(self, prefill: Prefill, tokens: NDArray[np.int32], *, reuses: bool = True) -> int:
        """Give a prompt's rows their blocks; return the number of tokens that need no computation."""
        self._rows.positions[list(prefill.rows)] = len(tokens)
        self._begin(prefill.rows)
        return self._table.begin(prefill.rows, tokens, reuses=reuses)

    def _fill(self, batch: Sequence[Prefill], start: int = 0) -> int:
        """Compute the prompts together from position `start`; return the padded length of a prompt."""
        lengths = [len(prefill.token_ids) for prefill in batch]
        longest = max(lengths) - start
        if self._graphs is not None:  # pad a single token, which torch would compile separately
            longest = max(longest, 2)
        token_ids = np.zeros((len(batch), longest), dtype=np.int64)
        for index, prefill in enumerate(batch):
            token_ids[index, : lengths[index] - start] = prefill.token_ids[start:]
        positions = torch.arange(start, start + longest, device=self._device)[None, :].expand(len(batch), -1)
        kept = [self._prompts.begin(prefill.rows, len(prefill.token_ids)) for prefill in batch] if self._prompts else []
        plan = self._cache.plan_prefill([prefill.rows for prefill in batch], lengths, start, longest, kept)
        self._forward.fill(self._on_device(token_ids), positions, self._cache, plan)
        self._table.settle([row for prefill in batch for row in prefill.rows])
        return longest

    def warm_up(self) -> None:
        """Run each kind of forward, so that loading raises `ModelError`; on a GPU, capture all CUDA graphs."""
        if self._graphs is not None:
            self._graphs.capture_all()
        self.prefill([Prefill([0, 0], [0])])
        self.place([RowState(0, 0, 2, 0, temperature=1.0, top_p=1.0, top_k=0)])
        self.decode(1)

    def decoded_in_batch(self, count: int) -> tuple[list[int], list[float]]:
        """Return token and log-prob of a fixed prompt in a batch of `count`, to test invariance; it clears all rows."""
        rows = list(range(min(count, self.slots)))
        prompts = [[token % self.vocab_size for token in range(1 + row, 4 + row + row % 5)] for row in rows]
        self.prefill([Prefill(prompt, [row]) for row, prompt in zip(rows, prompts, strict=True)])
        self.place([RowState(row, 1, len(prompts[row]), 0, temperature=1.0, top_p=1.0, top_k=0) for row in rows])
        token_ids, logprobs = self.decode(len(rows))
        self.clear(rows)
        self.release(rows)
        return token_ids[:1], logprobs[:1]

    @torch.inference_mode()
    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Decode a token of each of rows 0..num_rows-1, and its draft; return the first tokens' ids and log-probs."""
        rows, used = self._rows, slice(0, num_rows)
        if not self.reserve(num_rows):
            raise RuntimeError("the cache has no room for the next token; preempt a row before the step")
        self._table.tokens[self._all_rows[used], rows.positions[used]] = rows.feeds[used]
        self.top_logprobs, self.further = _NO_TOP, NOTHING_FURTHER
        if (drafts := self._drafts(rows.positions[used])) is not None:
            return self._verify(num_rows, drafts)
        step, order = self.early_step.take(num_rows)
        if step is None:
            step = self._start(num_rows)
        if order is None and self._may_start_early(num_rows):
            self.early_step.keep(self._start(num_rows, after=step))
        token_ids, logprobs = (each[:num_rows] if order is None else each[order] for each in step.read())
        rows.advance(used, token_ids)
        return token_ids.tolist(), logprobs.tolist()

    def _drafts(self, positions: NDArray[np.int64]) -> Drafts | None:
        """Return the drafts of rows at `positions`, written to the table; None if there are none, or no blocks."""
        tokens = self._table.tokens
        drafts = None if self._drafter is None else self._drafter.drafts(tokens, positions)
        if drafts is None or not self._table.grow(positions, drafts.lengths):
            return None
        tokens[drafts.rows, positions[drafts.rows] + drafts.skipped] = drafts.feeds
        return drafts

    def _verify(self, num_rows: int, drafts: Drafts) -> tuple[list[int], list[float]]:
        """Decode the rows with their drafts; keep each row's tokens up to the first that differs from its draft."""
        token_ids, logprobs = self._start(num_rows, drafts=drafts).read()
        accepted = drafts.accepted(token_ids, logprobs)
        if self._drafter is not None:
            self._drafter.learn(drafts, accepted)
        top, firsts, log = self.top_logprobs, drafts.firsts, self.route_log
        routed = log.decoded if log is not None and log.is_on else None
        spans = list(zip(firsts.tolist(), (firsts + accepted).tolist(), strict=True))
        self.further = {
            row: [
                FurtherToken(
                    int(token_ids[place]),
                    float(logprobs[place]),
                    top.get(place),
                    None if routed is None else routed[place],
                )
                for place in range(first + 1, last + 1)
            ]
            for row, (first, last) in enumerate(spans)
            if last > first
        }
        self.top_logprobs = {row: top[first] for row, (first, _) in enumerate(spans) if first in top}
        if log is not None and routed is not None:
            log.decoded = routed[firsts]
        sampled = [token_ids[first:last].tolist() for first, last in spans]
        self._rows.advance(slice(0, num_rows), token_ids[firsts + accepted], sampled)
        return token_ids[firsts].tolist(), logprobs[firsts].tolist()

    def _may_start_early(self, num_rows: int) -> bool:
        """Return True if the step after the next one needs nothing from the host but its rows' positions and noise."""
        used, log = slice(0, num_rows), self.route_log
        after = self._rows.positions[used] + 1
        return (
            self.early_step.allowed
            and self._rows.keep_whole(used)
            and (log is None or not log.is_on)
            and int(after.max()) < self.context_length
            and self._table.grow(after)
        )

    def _start(self, num_rows: int, *, after: StartedStep | None = None, drafts: Drafts | None = None) -> StartedStep:
        """Start a step of rows 0..num_rows-1, which samples a token of each, or with `drafts` one for each that they
        feed.

        With `after`, a step that may be unfinished, the new step feeds the tokens that `after` samples.
        """
        rows = self._rows
        used = slice(0, num_rows) if drafts is None else drafts.rows
        skipped = int(after is not None) if drafts is None else drafts.skipped
        positions: NDArray[Any] = rows.positions[used] + skipped
        noise = rows.noise(used, skipped=skipped)
        feeds: NDArray[Any] | Tensor = rows.feeds[used] if drafts is None else drafts.feeds
        if after is not None:
            feeds = after.token_ids[:num_rows]
        several = None if drafts is None else drafts.rows
        alike = self._alike.step(rows.feeds[used], positions) if self._alike is not None else None
        if self._graphs is not None:
            logits = self._graphs.run(Inputs(feeds, positions, rows.temperature[used], noise, several))
            if rows.keep_whole(used):
                return self._graphs.sampled(len(positions))
        else:
            plan = self._cache.plan_decode(positions, alike, several)
            if not isinstance(feeds, Tensor):
                feeds = self._on_device(feeds if alike is None else feeds[alike.first])
            logits = plan.to_rows(self._forward.logits(feeds[:, None], plan.positions, self._cache, plan))
        if rows.any_change:
            logits = add_to_logits(logits, rows.changes, drafts)
        drawn = sample(
            logits,
            temperature=torch.from_numpy(rows.temperature[used]),
            top_k=torch.from_numpy(rows.top_k[used]),
            top_p=torch.from_numpy(rows.top_p[used]),
            noise=torch.from_numpy(noise),
            min_p=torch.from_numpy(rows.min_p[used]) if rows.any_min_p else None,
            policy_logprobs=torch.from_numpy(rows.policy_logprobs[used]),
            most_top=rows.most_top,
        )
        if drawn.top_ids is not None and drawn.top_logprobs is not None:
            self.top_logprobs = rows.top_of(drawn.top_ids.cpu().numpy(), drawn.top_logprobs.cpu().numpy(), several)
        if self.route_log is not None and self.route_log.is_on:
            routed = self.route_log.take()
            self.route_log.decoded = routed if alike is None else routed[alike.of_row]
        return StartedStep(drawn.token_ids, lambda: (drawn.token_ids.cpu().numpy(), drawn.logprobs.cpu().numpy()))

    @torch.inference_mode()
    def decoded_logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> list[list[float]]:
        """Return the log-probs of up to `slots` given answers, computed as `decode` computes those of its samples.

        No other rows may be in use. Each prompt and each answer has at least one token.
        """
        order = sorted(range(len(prompts)), key=lambda row: -len(answers[row]))
        given = [(prompts[number], answers[number], temperatures[number]) for number in order]
        self.prefill([Prefill(prompt[:-1], [row]) for row, (prompt, _, _) in enumerate(given) if len(prompt) > 1])
        self.place(
            [
                RowState(row, prompt[-1], len(prompt) - 1, 0, temperature=temperature, top_p=1.0, top_k=0)
                for row, (prompt, _, temperature) in enumerate(given)
            ]
        )
        scored: list[list[float]] = [[] for _ in prompts]
        for step in range(len(given[0][1])):
            forced = np.array([answer[step] for _, answer, _ in given if len(answer) > step])
            used, rows = slice(0, len(forced)), self._rows
            if not self.reserve(len(forced)):
                raise RuntimeError("the cache has no room for the next token; score fewer answers at once")
            self._table.tokens[self._all_rows[used], rows.positions[used]] = rows.feeds[used]
            plan = self._cache.plan_decode(rows.positions[used], None)
            logits = self._forward.logits(self._on_device(rows.feeds[used])[:, None], plan.positions, self._cache, plan)
            scale = torch.from_numpy(rows.temperature[used]).to(logits.device)[:, None]
            tempered = plan.to_rows(logits).float() / scale
            chosen = torch.log_softmax(tempered, dim=-1).gather(1, self._on_device(forced)[:, None])[:, 0]
            for number, logprob in zip(order, chosen.tolist(), strict=False):
                scored[number].append(logprob)
            rows.advance(used, forced)
        self.release(range(len(given)))
        return scored

    @torch.inference_mode()
    def scorer(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Return each token's log-prob, 0 for the first, by a forward without the cache that holds all logits."""
        if len(token_ids) < 2:
            return [0.0] * len(token_ids)
        tokens = torch.tensor(token_ids, device=self._device)
        # Without a plan, attention is causal over the prompt and uses no cache.
        output: Any = self._model(
            input_ids=tokens[None, :-1],
            position_ids=torch.arange(len(tokens) - 1, device=self._device)[None],
            use_cache=False,
        )
        found = [0.0]
        parts = zip(output.logits[0].split(_SCORED_AT_ONCE), tokens[1:].split(_SCORED_AT_ONCE), strict=True)
        for logits, targets in parts:
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, targets[:, None])
            found += logprobs[:, 0].tolist()
        return found

    def _begin(self, rows: Sequence[int]) -> None:
        if self._alike is not None:
            self._alike.begin(rows)
        if self._drafter is not None:
            self._drafter.begin(rows)

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # --- weights -------------------------------------------------------------------------------------------------

    def staging(self) -> Tensor:
        return self._weights.staging()

    def finish_staging(self) -> None:
        """Quantise the staged weights, if weights are served quantised."""
        self._weights.finish_staging()

    def swap(self) -> None:
        """Make the staged weights current; cached results of older weights are not reused from now on."""
        self.early_step.drop()
        self._weights.swap()
        self._table.forget()
        if self._prompts is not None:
            self._prompts.forget()


def cache_shape_of(model: nn.Module, options: EngineOptions) -> CacheShape:
    """Return the shape of a model's cache. Windows keep whole sequences if they are as long as the context, and where
    each row must read its blocks from the first on.
    """
    shape = ModuleForward(model).cache_shape()
    # The end of a draft may be in the block after the row's next token, whose window reaches further back.
    window = shape.window and shape.window + length_of(options.options)
    if (
        LlamaForward.fits(model)
        or options.kernels is Kernels.BATCH_INVARIANT
        or (window or 0) >= options.context_length
    ):
        return replace(shape, window=None, windowed=frozenset())
    return replace(shape, window=window)


def served_weights(model: nn.Module, form: WeightFormat) -> TorchWeights | QuantizedWeights:
    """Return the weights of a model in the format in which they are served."""
    return TorchWeights(model) if form is WeightFormat.NATIVE else QuantizedWeights(model, form)


def _batches(prefills: Sequence[Prefill], start: int = 0, *, pads: bool = True) -> Iterator[list[Prefill]]:
    """Yield batches of prefills of similar length, or of equal length without `pads`, each of at most `PREFILL_TOKENS`
    padded tokens after position `start`; a longer prompt runs alone.
    """
    batch: list[Prefill] = []
    for prefill in sorted(prefills, key=lambda each: len(each.token_ids)):
        length = len(prefill.token_ids)
        is_full = (length - start) * (len(batch) + 1) > PREFILL_TOKENS
        if batch and (is_full or not (pads or length == len(batch[0].token_ids))):
            yield batch
            batch = []
        batch.append(prefill)
    if batch:
        yield batch
