"""`Publishing`: one publication of weights at a time, during a step; `StreamAnnouncer`: announcements to engines."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from itertools import product
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from pydantic import ValidationError

from inference_contract.errors import ContractError, from_wire
from inference_contract.weights import OnUpdate, WeightUpdateRequest, WeightUpdateResponse
from pipelinerl.errors import PipelineError, UpdateError
from pipelinerl.messages import (
    ANNOUNCEMENTS,
    TAKEN,
    CanaryChecked,
    Directive,
    Published,
    WeightsAnnounced,
    WeightsTaken,
    decode_taken,
    encode,
)
from pipelinerl.streams.stream import START, Stream, fresh_number
from pipelinerl.training.canary_check import CanaryCheck, CanaryFindings, Depth
from pipelinerl.training.engine_proofs import EngineProofs
from pipelinerl.training.rollouts.admission import Proof, versions_of
from pipelinerl.training.rollouts.rollout_reader import ControllerLink
from pipelinerl.training.step import Accumulated
from pipelinerl.types import RolloutGroup
from pipelinerl.weights.grace import Grace, floor_s, update_kind
from pipelinerl.weights.publisher import Publication, Publisher, PublishReport, wire_layout
from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32, MicroBatch

log = logging.getLogger("pipelinerl")

T = TypeVar("T")

#: Seconds for which the groups of an engine that does not answer the canary wait; and between two requests to it.
_PROOF_S: Final = 30.0
_AGAIN_S: Final = 1.0


class Publishing:
    """Publishes the trainer's weights to the engines, and checks that they compute with them.

    The directive lists the engines that join, in `to_verify`. All others are checked briefly after each publication.
    `EngineProofs` judges their answers, and the tokens that engines sampled for a step.

    An engine owes a proof of each version that it is sent. No step trains on tokens of a version that is not proven:

    | the engine | groups with its tokens of this version |
    |---|---|
    | fails the proof | are disproved, and sampled again |
    | does not answer the canary | wait while it is asked again; after `_PROOF_S`, they are disproved |
    | has left, or got other weights, before it answered | are sampled again |

    During a publication the trainer computes, but it changes its weights only after `finish`:

        await publishing.begin(directive, version)  # begins a task:
            await link.raise_if_fenced()
            await publisher.publish(publication)
            await link.report(Published(...))
            await check_canary(engines, report, forward, depth)
            await link.report(CanaryChecked(...))
        step.accumulate(batch)                   # reads the weights, too
        await publishing.finish()                # the task has ended: the engines have the weights
        step.apply(accumulated)                  # changes the weights

    A publication that fails is reported for each engine; training continues.
    """

    def __init__(
        self,
        trainer: Trainer,
        link: ControllerLink,
        publisher: Publisher,
        check_canary: CanaryCheck,
        *,
        proofs: EngineProofs,
        worker: Executor,
        on_update: OnUpdate,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._link = link
        self._publisher = publisher
        self._check_canary = check_canary
        self._proofs = proofs
        self._worker = worker
        self._layout = wire_layout(trainer.weight_layout())
        self._on_update = on_update
        self._timeout_s = timeout_s
        self._under_way: asyncio.Task[None] | None = None
        # Versions, by engine and epoch, that are not proven; True if the engine has reported that it serves them.
        self._owed: dict[tuple[str, int, int], bool] = {}
        self._silent: dict[str, float] = {}  # when engines that did not answer the newest canary were first asked
        self._asked_at = 0.0
        self._newest_begun = (0, -1)  # epoch and version
        self._is_checking = self._owes_older = False
        self._disproved: set[tuple[str, int, int]] = set()
        self._newest: PublishReport | None = None
        self._membership = 0

    async def disproved(self, accumulated: Accumulated, version: int) -> set[tuple[str, int, int]]:
        """Test what `version` sampled for a step; return what is newly disproved: base URL, epoch, version."""
        failures = await self._in_worker(lambda: self._proofs.failed_rollouts(accumulated, version))
        if failures and self._newest is not None:
            await self._report_failures(self._newest, failures)
        return self._take_disproved()

    def proof_of(self, group: RolloutGroup) -> Proof:
        """Return whether the group's engines have proven the versions that sampled it.

        A check that has not ended yet counts as passed; `finish` waits for it. If several engines sampled a group, an
        engine counts for the versions that it has reported.
        """
        if not self._owed or (self._is_checking and not self._owes_older):
            return Proof.COMPLETE
        keys = product(group.engines, {rollout.epoch for rollout in group.rollouts}, versions_of(group))
        counts_all = len(group.engines) == 1
        owed = [key for key in keys if key in self._owed and (counts_all or self._owed[key])]
        if any((epoch, version) != self._newest_begun for _, epoch, version in owed):
            return Proof.MISSING
        if not owed or self._is_checking:
            return Proof.COMPLETE
        return Proof.AWAITED if all(url in self._silent for url, _, _ in owed) else Proof.MISSING

    def ask_again(self, version: int) -> set[tuple[str, int, int]]:
        """Repeat the canary to engines that owe an answer, if they were sent the trainer's weights, those of `version`.

        Else only let their time pass. Return at once, with all that is newly disproved.
        """
        report, now = self._newest, time.monotonic()
        is_due = bool(self._silent) and self._under_way is None and now - self._asked_at >= _AGAIN_S
        if is_due and report is not None:
            asked = [*self._silent] if report.version == version else []
            lost = dict.fromkeys(self._silent.keys() - {*asked}, "no answer before the trainer's next step")
            self._under_way = asyncio.create_task(self._prove([], asked, report, lost))
        return self._take_disproved()

    def _take_disproved(self) -> set[tuple[str, int, int]]:
        disproved, self._disproved = self._disproved, set()
        return disproved

    async def begin(self, directive: Directive, version: int) -> None:
        """Wait for the previous publication, then start publishing the current weights to the directive's engines."""
        await self.finish()
        publication = Publication(
            version=version,
            epoch=directive.epoch,
            layout=self._layout,
            weights=self._trainer.gather_weights,
            engines=directive.publish_to,
            membership=directive.membership,
            on_update=self._on_update,
            timeout_s=self._timeout_s,
        )
        self._under_way = asyncio.create_task(self._publish(publication, directive))

    async def finish(self) -> None:
        """Wait for the current publication, if any; weights may change only afterwards."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def raise_if_failed(self) -> None:
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    async def close(self) -> None:
        await self._publisher.close()

    async def _publish(self, publication: Publication, directive: Directive) -> None:
        await self._link.raise_if_fenced()
        self._newest_begun, self._is_checking = (publication.epoch, publication.version), True
        self._owes_older = any((epoch, version) != self._newest_begun for _, epoch, version in self._owed)
        self._owed |= {(url, *self._newest_begun): False for url in publication.engines}
        try:
            report = await self._publisher.publish(publication)
        except UpdateError as error:
            log.error("publication of version %d failed: %s", publication.version, error)
            report = PublishReport.failure(publication, error)
        await self._link.report(
            Published(
                epoch=report.epoch,
                model_version=report.version,
                membership=publication.membership,
                pauses_s=dict(report.pauses_s),
                failed=dict(report.failed),
                permanent=sorted(report.permanent),
                blameless=sorted(report.blameless),
                error=report.error,
                send_s=report.send_s,
                total_s=report.total_s,
                directive=directive.answers,
            )
        )
        self._newest, self._membership = report, publication.membership
        joining = [url for url in directive.to_verify if url in report.pauses_s]
        others = [url for url in report.pauses_s if url not in joining]
        self._silent = {url: since for url, since in self._silent.items() if url in others}
        self._owed |= {(url, report.epoch, report.version): True for url in report.pauses_s}
        # The trainer's thread takes the weights before it computes the answers, and engines answer in the meantime.
        await asyncio.gather(
            self._in_worker(lambda: self._proofs.publish(report.version, self._trainer.gather_weights)),
            self._prove(joining, others, report),
        )

    async def _prove(
        self,
        joining: Sequence[str],
        others: Sequence[str],
        report: PublishReport,
        lost: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Check engines, report who joined and who fails; `lost` can no longer prove it, and why."""
        proofs, version, self._asked_at = self._proofs, report.version, time.monotonic()
        briefly = {url for url in others if proofs.depth(url, version) is Depth.BRIEF}
        findings, again, close = await asyncio.gather(
            self._checked(joining, report, Depth.JOINING),
            self._checked([*briefly], report, Depth.BRIEF),
            self._checked([url for url in others if url not in briefly], report, Depth.CLOSE),
        )
        for name in ("worst", "compared", "mismatched", "failed"):
            getattr(again, name).update(getattr(close, name))
        again.failed.update(lost)
        suspects, failures = await self._in_worker(lambda: self._judged(version, findings, again, briefly))
        if suspects:
            more = await self._checked(suspects, report, Depth.CLOSE)
            again.failed.update(more.failed)
            failures |= (await self._in_worker(lambda: self._judged(version, CanaryFindings(), more, more=True)))[1]
        for url in [*findings.worst, *(again.worst.keys() - failures.keys() - again.failed.keys())]:
            self._owed.pop((url, report.epoch, version), None)
        # Disprove what engines sampled that have owed an answer for too long.
        now, self._is_checking = time.monotonic(), False
        self._silent = {url: self._silent.get(url, now) for url in again.failed}
        overdue = {url: why for url, why in again.failed.items() if now - self._silent[url] >= _PROOF_S}
        for url, why in overdue.items():
            del self._silent[url]
            self._disprove(url, report, f"no proof within {_PROOF_S:g} s: {why}")
        if joining or overdue:
            await self._link.report(
                CanaryChecked(
                    epoch=report.epoch,
                    model_version=version,
                    membership=self._membership,
                    worst=findings.worst,
                    mismatched=findings.mismatched,
                    failed=findings.failed | overdue,
                    permanent=sorted(findings.permanent),
                )
            )
        if failures:
            await self._report_failures(report, failures, of=len(others))

    def _judged(
        self,
        version: int,
        joined: CanaryFindings,
        again: CanaryFindings,
        briefly: Collection[str] = (),
        *,
        more: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """Return which engines checked `briefly` must answer more, and why others fail; begin new evidence."""
        proofs, suspects, failures = self._proofs, list[str](), dict[str, str]()
        for url in [*joined.worst]:
            if url in joined.compared and (reason := proofs.joined(url, joined.compared[url])):
                del joined.worst[url]
                joined.mismatched[url] = reason
        for url, its in again.compared.items():
            if proofs.add(url, its, more=more) and url in briefly:
                suspects.append(url)
            elif wrong := again.mismatched.get(url):
                failures[url] = f"{wrong}; {proofs.fault(version, its)}"
            elif reason := proofs.failure(url, version, its):
                failures[url] = reason
        return suspects, again.mismatched | failures

    async def _report_failures(self, report: PublishReport, failures: dict[str, str], *, of: int = 0) -> None:
        if len(failures) == of > 1:
            likely = f"all {of} checked engines fail, so look first at the trainer, weights.transport and weights.dtype"
            failures = {url: f"{likely}; {reason}" for url, reason in failures.items()}
        for url, reason in failures.items():
            self._disprove(url, report, reason)
        await self._link.report(
            CanaryChecked(
                epoch=report.epoch,
                model_version=report.version,
                membership=self._membership,
                worst={},
                mismatched=failures,
            )
        )

    def _disprove(self, url: str, report: PublishReport, why: str) -> None:
        """Disprove what the engine has sampled since its last proof."""
        log.error("what %s sampled with version %d is not trained: %s", url, report.version, why)
        self._disproved |= {(url, report.epoch, report.version), *(each for each in self._owed if each[0] == url)}

    async def _checked(self, urls: Sequence[str], report: PublishReport, depth: Depth) -> CanaryFindings:
        return await self._check_canary(urls, report, self._forward, depth) if urls else CanaryFindings()

    async def _forward(self, batch: MicroBatch) -> Float32:
        return await self._in_worker(lambda: self._proofs.score(batch))

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)


#: The result of an update for one engine: the version that it serves, or the error that prevented the update.
_Outcome = WeightUpdateResponse | ContractError | PipelineError

_MOST: Final = 4096
_BLOCK_S: Final = 1.0


class StreamAnnouncer:
    """Announces versions to engines that read them from a stream. Use one event loop, and one call at a time.

    Once an engine has answered, others get their grace (`weights/grace.py`): a later one is reported as late. An engine
    without history gets `quiet_s` after the newest answer, and then a request by the publisher.
    """

    def __init__(self, stream: Stream, *, grace: Grace | None = None, quiet_s: float = 5.0) -> None:
        self._stream = stream
        self._grace = Grace() if grace is None else grace
        self._quiet_s = quiet_s
        self._offset = START
        self._follow: set[str] = set()

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, _Outcome]:
        """Announce the PREPARE, with only the layout's id, to `engines`, but not to `left_out`; sources rotate.

        Return by URL what an engine serves at `deadline` (monotonic), or why it failed; silent engines are missing.
        """
        before = self._offset
        while await self._read_reports(block_s=0.0):
            pass
        awaited = self._follow.intersection(engines)
        if not awaited:
            return {}
        announced = WeightsAnnounced(prepare=prepare.model_dump_json(exclude_none=True).encode(), left_out=[*left_out])
        number = fresh_number(await self._stream.last_id(ANNOUNCEMENTS))
        await self._stream.append(ANNOUNCEMENTS, [encode(announced)], first_id=number)
        answers = await self._answers(prepare, awaited, engines=len(engines), deadline=deadline)
        self._follow -= awaited
        await self._stream.trim(ANNOUNCEMENTS, before=f"{number}-0")
        # Keep the reports of this update, since later trainers read them; trim only older reports.
        await self._stream.trim(TAKEN, before=before)
        return answers

    async def _answers(
        self, prepare: WeightUpdateRequest, awaited: set[str], *, engines: int, deadline: float
    ) -> dict[str, _Outcome]:
        """Return the answers of engines in `awaited`, which keeps those that have not answered."""
        what, began, answers = update_kind(prepare.on_update), time.monotonic(), dict[str, _Outcome]()
        until = min(deadline, began + self._quiet_s)
        first_at = 0.0
        while awaited and (now := time.monotonic()) < until:
            for report in await self._read_reports(block_s=min(_BLOCK_S, until - now)):
                if report.url not in awaited or (report.epoch, report.version) != (prepare.epoch, prepare.version):
                    continue
                now = time.monotonic()
                answers[report.url], first_at = _answer(report), first_at or now
                awaited.discard(report.url)
                self._grace.note(what, report.url, now - began)
                limit_s = self._grace.of(what, awaited, engines=engines, most_s=math.inf)
                until = min(deadline, now + self._quiet_s, max(began + limit_s, first_at + floor_s(engines)))
        waited_s = time.monotonic() - began
        late = [
            url
            for url in awaited
            if answers and math.isfinite(self._grace.of(what, [url], engines=engines, most_s=math.inf))
        ]
        answers |= {url: self._grace.late(what, url, waited_s) for url in late}
        if len(awaited) > len(late):
            log.warning(
                "engines that follow announcements have not reported, and get requests: %s", awaited - set(late)
            )
        return answers

    async def _read_reports(self, *, block_s: float) -> list[WeightsTaken]:
        reports = []
        for entry in await self._stream.read({TAKEN: self._offset}, count=_MOST, block_s=block_s):
            self._offset = entry.entry_id
            try:
                reports.append(decode_taken(entry.payload))
            except msgspec.DecodeError:
                log.error("skipping an unreadable report of an engine's weights: %s", entry.entry_id)
        self._follow |= {report.url for report in reports}
        return reports


def _answer(report: WeightsTaken) -> _Outcome:
    try:
        if not report.error:
            return WeightUpdateResponse.model_validate_json(report.answer)
        details: object = json.loads(report.error)
    except (ValidationError, ValueError):
        details = None
    return from_wire(report.status, details)
