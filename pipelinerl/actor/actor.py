"""The actor's loop: claim a prompt order, make its group (single turns or episodes), append the group to the stream.

A prompt order (`PromptOrder`) is the controller's request for one group: G rollouts of one prompt.

    loop       consumes                  waits for              unblocked by
    claim      prompt orders (stream)    room for a new group   a group that ended
    work × n   one order                 the engine's answer    the engine, or another one after a failure
    flush      finished groups           —                      Redis
    heartbeat  —                         its interval           the clock

An order is acknowledged only after its group is appended, so another actor can claim the orders of a dead one. A group
may therefore be appended twice; the trainer drops the duplicate by its group id. If two actors have the same name, the
one that started earlier exits (`RolloutWriter`). Every order ends as a group, an evaluation answer, a failure with its
reason, or a dropped group that would be stale (`freshness.py`). An exception of user code is such a failure, so no
order ends the actor. Unreadable orders, and those that fail by an exception, go to the dead-letter stream.

An order may also kill the actor's process: user code that crashes or exits, or exhausts the memory. The restarted actor
gets its orders again, and the stream counts the deliveries. Orders that two processes did not survive run alone, so
that a third death has only one suspect; an order that three processes did not survive goes to the dead-letter stream.
Later orders of the same problem fail at once; actors that start read these problems from `DEADLY_ORDERS`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from inference_contract.errors import ContractError, Persistence
from inference_contract.schemas import FinishReason
from pipelinerl.actor.freshness import Freshness, Held
from pipelinerl.actor.group_maker import GroupMaker, GroupProgress, MadeRollout, ToolCalls
from pipelinerl.actor.rollouts import RolloutWriter, assemble, shown_problem
from pipelinerl.errors import PipelineError, RecordError
from pipelinerl.messages import (
    ACTORS_GROUP,
    PROMPTS,
    REPORTS,
    ActorAlive,
    ControlMessage,
    EvaluationDone,
    GroupFailed,
    GroupHandedOver,
    GroupOutdated,
    GroupStages,
    ShownProblem,
    VerifierFigures,
    encode,
)
from pipelinerl.streams.records import decode_order, encode_group
from pipelinerl.streams.stream import DEADLY_ORDERS, START, DeadLetters, Entry, Stream
from pipelinerl.system.background import raise_if_cancelled
from pipelinerl.system.references import last_line
from pipelinerl.types import Outcome, PromptOrder, Purpose, RolloutGroup
from pipelinerl.verifiers.group_filter import GroupFilter, refusal_of
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, failed, shown

log = logging.getLogger("pipelinerl")

#: Name under which the decisions of the recipe's group filter are counted, whether it keeps or refuses a group.
_FILTER: Final = "filter"
#: One training group in `_ONE_IN`, chosen by the seed of its order, is in the stage log. A heartbeat has at most
#: `_MOST_STAGES` groups of at most `_MOST_STAGE_SPANS` spans, so its size does not depend on the number of groups.
_ONE_IN: Final = 4
_MOST_STAGES: Final = 4
_MOST_STAGE_SPANS: Final = 32
#: An actor keeps at most this many orders that failed unexpectedly in the dead-letter stream.
_MOST_BURIED: Final = 16
#: In its first deliveries an order runs together with others, then alone; after the last it fails at once.
_BESIDE_OTHERS: Final = 2
_MOST_DEADLY: Final = 10_000
_MOST_DELIVERIES: Final = 3
#: Seconds in which an actor that stops in order gives back its orders.
_GIVE_BACK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """Settings of an actor. `groups_in_flight` is the initial limit; `Actor.resize` changes it during the run."""

    name: str
    groups_in_flight: int
    reclaim_idle_s: float = 15.0
    heartbeat_s: float = 2.0
    block_s: float = 0.25


@dataclass(slots=True)
class _Outbox:
    """Finished groups, reports and acknowledgements (entry ids), to be written to the streams in this order.

    Groups and reports are encoded already: a value that cannot be encoded fails its order, and not the writing of all.
    """

    groups: list[bytes] = field(default_factory=list)
    reports: list[bytes] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class GroupLimiter:
    """Limit on the orders (requested groups) in flight, each of which takes a slot; any task may give back a slot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._freed = asyncio.Event()

    async def take(self, most: int | None = None) -> int:
        """Wait until a slot (room for one order) is free; take the free slots, at most `most`, and return how many."""
        while self._taken >= self._limit:
            self._freed.clear()
            await self._freed.wait()
        free = self._limit - self._taken
        taken = free if most is None else min(free, most)
        self._taken += taken
        return taken

    def give_back(self, places: int = 1) -> None:
        self._taken -= places
        self._freed.set()

    def resize(self, limit: int) -> None:
        """Change the limit; if more orders than that are in flight, some must finish before a new one starts."""
        self._limit = limit
        self._freed.set()


class StageLog:
    """Recorder of the times at which some training groups (one in four) are claimed, sampled and verified."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Create a log. `clock` returns Unix seconds, so that times from different machines can be compared."""
        self._clock = clock
        self._claimed: dict[str, float] = {}
        self._ended: list[GroupStages] = []

    @contextmanager
    def claimed(self, order: PromptOrder) -> Iterator[None]:
        """Record times of an order during the `with` block; at its end, drop them unless the group was verified."""
        if order.purpose is Purpose.TRAINING and order.seed % _ONE_IN == 0:
            self._claimed[order.order_id] = self._clock()
        try:
            yield
        finally:
            self._claimed.pop(order.order_id, None)

    def verified(self, order: PromptOrder, progress: GroupProgress) -> None:
        claimed = self._claimed.get(order.order_id)
        if claimed is not None and len(self._ended) < _MOST_STAGES:
            longest = max(progress.spans, key=lambda each: sum(tokens for _, tokens in each), default=())
            self._ended.append(
                GroupStages(
                    index=order.index,
                    claimed=claimed,
                    sampled=progress.sampled_at,
                    verified=self._clock(),
                    engine=progress.engine,
                    spans=[(version, tokens) for version, tokens in longest[:_MOST_STAGE_SPANS]],
                )
            )

    def take(self) -> list[GroupStages]:
        """Return the groups that were verified since the last call, and clear the list."""
        ended, self._ended = self._ended, []
        return ended


class VerifierTally:
    """Counter of verdicts, episodes and tool calls by domain since the actor started, and of failures in a row.

    An answer on which the verifier fails is masked (not trained). If the verifier of a domain always fails, the domain
    is sampled forever without effect; the controller detects this from these counts and ends the run.
    """

    def __init__(self) -> None:
        self.by_domain: dict[str, VerifierFigures] = {}

    def note(self, domain: str, judgements: Sequence[Judgement]) -> None:
        figures = self.by_domain.get(domain, VerifierFigures())
        for verdict, seconds in judgements:
            figures = replace(figures, seconds=figures.seconds + seconds)
            reason = f"{verdict.outcome}: {verdict.reason}"
            if verdict.outcome.is_judgement:
                figures = replace(figures, judged=figures.judged + 1, errors_in_a_row=0, timeouts_in_a_row=0, reason="")
            elif verdict.outcome is Outcome.TIMEOUT:
                in_a_row = figures.timeouts_in_a_row + 1
                figures = replace(figures, timeouts=figures.timeouts + 1, timeouts_in_a_row=in_a_row, reason=reason)
            else:
                in_a_row = figures.errors_in_a_row + 1
                figures = replace(figures, errors=figures.errors + 1, errors_in_a_row=in_a_row, reason=reason)
        self.by_domain[domain] = figures

    def note_episode(self, domain: str, calls: ToolCalls, environment_s: float) -> None:
        """Count an episode, its tool calls, and its seconds outside the model."""
        figures = self.by_domain.get(domain, VerifierFigures())
        self.by_domain[domain] = replace(
            figures,
            tool_episodes=figures.tool_episodes + calls.offered,
            calls_parsed=figures.calls_parsed + calls.parsed,
            calls_malformed=figures.calls_malformed + calls.malformed,
            episodes=figures.episodes + 1,
            environment_s=figures.environment_s + environment_s,
            tool_errors=figures.tool_errors + calls.failed,
        )


class Actor:
    """Worker that claims orders, has engines sample them, verifies the answers and appends the groups."""

    def __init__(
        self,
        settings: ActorSettings,
        *,
        stream: Stream,
        maker_of: Callable[[str], GroupMaker],
        group_filter: GroupFilter | None = None,
    ) -> None:
        self.settings = settings
        self._stream = stream
        self._maker_of = maker_of
        self._filter = group_filter
        self._outbox = _Outbox()
        self._in_work: dict[str, Entry] = {}  # by entry id, until the acknowledgement is written
        self._all_acknowledged = asyncio.Event()
        self._deadly: set[tuple[str, str]] = set()  # (domain, problem id)
        self._suspects: list[Entry] = []  # delivered to this actor, and waiting to run alone
        self._limiter = GroupLimiter(settings.groups_in_flight)
        self._freshness = Freshness()
        self._dead_letters = DeadLetters(stream)
        self._tally = VerifierTally()
        self._filter_tally = VerifierTally()
        self._stages = StageLog()
        self._groups_done = 0
        self._resampled = 0

    def resize(self, groups_in_flight: int) -> None:
        """Work on at most `groups_in_flight` orders (requested groups) at once from now on."""
        self._limiter.resize(groups_in_flight)

    def follow(self, *, model_version: int, k: float) -> None:
        """Set the trainer's version and the staleness bound `k`; drop groups that are now too old to train."""
        self._freshness.follow(current=model_version, k=k)

    async def run(self) -> None:
        """Work until cancelled. Raises `FencedError` in an ExceptionGroup if another actor of this name starts."""
        partition = await RolloutWriter.begin(self._stream, actor=self.settings.name)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._flush(partition))
                group.create_task(self._heartbeat())
                await self._claim(group)
        finally:
            # An actor that reaches this line was not killed by its orders, so this delivery does not count.
            with suppress(TimeoutError, PipelineError):
                async with asyncio.timeout(_GIVE_BACK_S):
                    await self._uncount(self._in_work.values())

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        for entry in await self._stream.read({DEADLY_ORDERS: START}, count=_MOST_DEADLY, block_s=0):
            self._deadly.add(_problem_of(decode_order(entry.payload)))
        held = await self._stream.held(PROMPTS, group=ACTORS_GROUP, consumer=self.settings.name)
        await self._set_aside([entry for entry in held if entry.deliveries > _BESIDE_OTHERS])
        await self._run_suspects(group)
        for entry in held:
            if entry.deliveries <= _BESIDE_OTHERS:
                await self._limiter.take(1)
                self._begin(group, entry)
        while True:
            await self._run_suspects(group)
            free = await self._limiter.take()
            entries = await self._stream.claim(
                PROMPTS,
                group=ACTORS_GROUP,
                consumer=self.settings.name,
                count=free,
                block_s=self.settings.block_s,
                reclaim_idle_s=self.settings.reclaim_idle_s,
            )
            begun = [entry for entry in entries if entry.deliveries <= _BESIDE_OTHERS]
            for entry in begun:
                self._begin(group, entry)
            self._limiter.give_back(free - len(begun))
            await self._set_aside([entry for entry in entries if entry.deliveries > _BESIDE_OTHERS])

    def _begin(self, group: asyncio.TaskGroup, entry: Entry) -> None:
        if entry.entry_id in self._in_work:  # after an outage, streams repeat orders
            self._limiter.give_back()
            return
        self._in_work[entry.entry_id] = entry
        self._all_acknowledged.clear()
        group.create_task(self._work(entry))

    async def _set_aside(self, entries: Sequence[Entry]) -> None:
        """Keep orders to run alone. While they wait, their latest delivery does not count."""
        waiting = {entry.entry_id for entry in self._suspects} | self._in_work.keys()
        suspects = [entry for entry in entries if entry.entry_id not in waiting]
        self._suspects += suspects
        await self._uncount(suspects)

    async def _run_suspects(self, group: asyncio.TaskGroup) -> None:
        """Run the orders that were set aside, each while no other order of this actor is in work."""
        while self._suspects:
            await self._finish_work()
            entry = self._suspects.pop(0)
            await self._set_deliveries([entry], entry.deliveries)
            await self._limiter.take(1)
            self._begin(group, entry)
            await self._finish_work()

    async def _finish_work(self) -> None:
        while self._in_work:
            await self._all_acknowledged.wait()

    async def _uncount(self, entries: Iterable[Entry]) -> None:
        count = attrgetter("deliveries")
        for deliveries, alike in groupby(sorted(entries, key=count), key=count):
            await self._set_deliveries(list(alike), deliveries - 1)

    async def _set_deliveries(self, entries: Sequence[Entry], deliveries: int) -> None:
        await self._stream.renew(
            PROMPTS,
            group=ACTORS_GROUP,
            consumer=self.settings.name,
            entry_ids=[entry.entry_id for entry in entries],
            deliveries=deliveries,
        )

    async def _work(self, entry: Entry) -> None:
        try:
            order = decode_order(entry.payload)
            if entry.deliveries > _MOST_DELIVERIES:
                await self._fail_deadly(entry, order)
            elif _problem_of(order) in self._deadly:
                self._fail(order, "an earlier order of this problem killed its actors", PipelineError())
            else:
                await self._fulfil(entry, order)
        except RecordError as error:
            # A retry cannot help. Acknowledge the order below, or actors would claim it forever.
            log.error("an order cannot be read: %s", error)
            await self._dead_letters.bury(entry, error)
        self._outbox.done.append(entry.entry_id)
        self._outbox.ready.set()
        self._limiter.give_back()

    async def _fulfil(self, entry: Entry, order: PromptOrder) -> None:
        try:
            with self._stages.claimed(order):
                whole = await self._made_in_time(order)
            if whole is None:
                return
            made, engines = whole
            refusal = await self._refusal(order, made)
            group = assemble(order, made, actor=self.settings.name, refusal=refusal, engines=engines)
            if order.purpose is Purpose.TRAINING:
                self._outbox.groups.append(encode_group(group))
                self._groups_done += 1
            else:
                self._report(_evaluation(order, group, shown_problem(order, made)))
        except (ContractError, PipelineError) as error:
            self._fail(order, str(error), error)
        except BaseException as error:  # user code may raise anything
            raise_if_cancelled(error)
            reason = last_line(error)
            log.error("order %s failed: %s", order.order_id, reason, exc_info=error)
            await self._fail_and_bury(entry, order, reason, error)

    def _fail(self, order: PromptOrder, reason: str, error: BaseException) -> None:
        self._report(
            GroupFailed(
                order_id=order.order_id,
                index=order.index,
                purpose=order.purpose,
                reason=shown(f"problem {order.problem.problem_id}: {reason}"),
                persistence=error.persistence if isinstance(error, ContractError) else Persistence.TRANSIENT,
                code=error.code if isinstance(error, ContractError) else "",
                issued_at=order.issued_at,
            )
        )

    async def _fail_deadly(self, entry: Entry, order: PromptOrder) -> None:
        """Fail an order without running it, because actor processes did not survive it, even when it ran alone."""
        deaths = entry.deliveries - 1
        reason = (
            f"order {order.order_id} of domain {order.problem.domain} was in work when the actor's process died, "
            f"{deaths} times and the last time alone; let the domain's reward or environment code not exit, crash or "
            "exhaust the memory"
        )
        log.error("problem %s is given up: %s", order.problem.problem_id, reason)
        self._deadly.add(_problem_of(order))
        await self._stream.append(DEADLY_ORDERS, [entry.payload])
        await self._fail_and_bury(entry, order, reason, PipelineError(reason))

    async def _fail_and_bury(self, entry: Entry, order: PromptOrder, reason: str, error: BaseException) -> None:
        # It counts as a failure of the domain's verifier: a domain in which nothing else happens ends the run.
        self._tally.note(order.problem.domain, [Judgement(failed(reason), 0.0)])
        self._fail(order, reason, error)
        if self._dead_letters.counts[entry.stream] < _MOST_BURIED:
            await self._dead_letters.bury(entry, RecordError(shown(reason)))

    def _report(self, message: ControlMessage) -> None:
        self._outbox.reports.append(encode(message))

    async def _made_in_time(self, order: PromptOrder) -> tuple[Sequence[MadeRollout], set[str]] | None:
        """Return verified rollouts and their engines; None if the group, not an evaluation, became too old to train."""
        if order.purpose is not Purpose.TRAINING:
            return await self._made(order, lambda: None)
        held = Held(asyncio.timeout(None))
        try:
            async with held.scope:
                with self._freshness.watched(held):
                    return await self._made(order, held.begin)
        except TimeoutError:
            if held.given_up is None:
                raise
        current = self._freshness.current
        self._report(
            GroupOutdated(
                order_id=order.order_id,
                index=order.index,
                oldest=held.given_up,
                current=current,
                domain=order.problem.domain,
                issued_at=order.issued_at,
            )
        )
        return None

    async def _refusal(self, order: PromptOrder, made: Sequence[MadeRollout]) -> str:
        """Return the reason why the recipe's group filter refuses the group, or "" if the filter keeps it.

        Evaluations, and groups in which the verifier judged no answer, are not filtered. A refused group is still
        appended, with the reason, so that the trainer can count it and users can inspect it.
        """
        verdicts = [each.rollout.verdict for each in made]
        is_filtered = order.purpose is Purpose.TRAINING and any(verdict.outcome.is_judgement for verdict in verdicts)
        if self._filter is None or not is_filtered:
            return ""
        sampled = [
            SampledAnswer(each.text, each.rollout.turns[-1].token_ids.tolist(), each.rollout.finish_reason)
            for each in made
        ]
        judgement = await self._filter.judge(order.problem, sampled, verdicts)
        self._filter_tally.note(_FILTER, [judgement])
        return refusal_of(judgement.verdict)

    async def _made(self, order: PromptOrder, begun: Callable[[], None]) -> tuple[Sequence[MadeRollout], set[str]]:
        """Make the group, and report its progress, even if it fails."""
        progress = GroupProgress(begun)
        try:
            return await self._maker_of(order.problem.domain).make(order, progress), progress.engines
        finally:
            self._resampled += progress.resampled
            kept, resampled = progress.tokens_kept, progress.tokens_resampled
            if kept or resampled:
                self._report(
                    GroupHandedOver(
                        order_id=order.order_id, index=order.index, tokens_kept=kept, tokens_resampled=resampled
                    )
                )
            for calls, environment_s in progress.episodes:
                self._tally.note_episode(order.problem.domain, calls, environment_s)
            if progress.judgements:
                self._tally.note(order.problem.domain, progress.judgements)
                self._stages.verified(order, progress)

    async def _flush(self, partition: RolloutWriter) -> None:
        outbox = self._outbox
        while True:
            await outbox.ready.wait()  # the event is set when an order ends, and by every heartbeat
            outbox.ready.clear()
            groups, outbox.groups = outbox.groups, []
            reports, outbox.reports = outbox.reports, []
            done, outbox.done = outbox.done, []
            if groups:
                await partition.append(groups)
            if reports:
                await self._stream.append(REPORTS, reports)
            if done:
                await self._stream.acknowledge(PROMPTS, group=ACTORS_GROUP, entry_ids=done)
                for entry_id in done:
                    self._in_work.pop(entry_id, None)
                if not self._in_work:
                    self._all_acknowledged.set()

    async def _heartbeat(self) -> None:
        while True:
            self._report(
                ActorAlive(
                    name=self.settings.name,
                    groups_in_flight=len(self._in_work),
                    groups_done=self._groups_done,
                    retries=self._resampled,
                    verifiers=self._tally.by_domain,
                    filtering=self._filter_tally.by_domain.get(_FILTER, VerifierFigures()),
                    stages=self._stages.take(),
                )
            )
            self._outbox.ready.set()
            held = [*self._in_work, *(entry.entry_id for entry in self._suspects)]
            await self._stream.renew(PROMPTS, group=ACTORS_GROUP, consumer=self.settings.name, entry_ids=held)
            await asyncio.sleep(self.settings.heartbeat_s)


def _problem_of(order: PromptOrder) -> tuple[str, str]:
    return order.problem.domain, order.problem.problem_id


def _evaluation(order: PromptOrder, group: RolloutGroup, shown: ShownProblem) -> EvaluationDone:
    outcomes = [rollout.verdict.outcome for rollout in group.rollouts]
    return EvaluationDone(
        order_id=order.order_id,
        index=order.index,
        correct=sum(outcome is Outcome.CORRECT for outcome in outcomes),
        judged=sum(outcome.is_judgement for outcome in outcomes),
        oldest_version=group.oldest_version,
        newest_version=max(rollout.newest_version for rollout in group.rollouts),
        num_tokens=sum(rollout.num_sampled_tokens for rollout in group.rollouts),
        epoch=group.epoch,
        domain=group.domain,
        tags=list(group.problem.tags),
        truncated=sum(rollout.finish_reason == FinishReason.LENGTH for rollout in group.rollouts),
        lengths=[rollout.num_sampled_tokens for rollout in group.rollouts],
        answers=[rollout.verdict.answer for rollout in group.rollouts],
        right=[outcome is Outcome.CORRECT for outcome in outcomes],
        shown=shown,
        unjudged=[place for place, outcome in enumerate(outcomes) if not outcome.is_judgement],
    )
