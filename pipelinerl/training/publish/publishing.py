"""`Publishing`: at most one publication of weights under way beside the step, and the report of how it went."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import final

from inference_contract.weights import OnUpdate
from pipelinerl.errors import UpdateError
from pipelinerl.messages import CanaryChecked, Directive, Published
from pipelinerl.training.controller_link import ControllerLink
from pipelinerl.training.publish.canary_check import CanaryChecker
from pipelinerl.weights.publisher import Publication, Publisher, PublishReport, wire_layout
from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32, MicroBatch

log = logging.getLogger("pipelinerl")


@final
class Publishing:
    """Takes the trainer's weights to the engines, and has those prove them that the controller does not trust yet.

    The trainer computes on meanwhile, and changes its weights only after `finish`:

        await publishing.begin(directive, version)  # begins a task:
            await link.raise_if_fenced()
            await publisher.publish(publication)
            await link.report(Published(...))
            await canary_checker.check(directive.to_verify, report, forward)
            await link.report(CanaryChecked(...))
        step.accumulate(batch)                   # reads the weights, too
        await publishing.finish()                # the task has ended: the engines have them
        step.apply(accumulated)                  # changes them

    A publication that fails is reported, engine by engine; training goes on.
    """

    def __init__(
        self,
        trainer: Trainer,
        link: ControllerLink,
        publisher: Publisher,
        canary_checker: CanaryChecker,
        *,
        worker: Executor,
        on_update: OnUpdate,
        timeout_s: float,
    ) -> None:
        """`worker` is the thread on which the trainer computes; `timeout_s` bounds a publication."""
        self._trainer = trainer
        self._link = link
        self._publisher = publisher
        self._canary_checker = canary_checker
        self._worker = worker
        self._layout = wire_layout(trainer.weight_layout())
        self._on_update = on_update
        self._timeout_s = timeout_s
        self._under_way: asyncio.Task[None] | None = None

    async def begin(self, directive: Directive, version: int) -> None:
        """Publish the weights as they are to the engines that the directive names, once the one before has ended."""
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
        """Wait for the publication under way, if any: weights may change only afterwards."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def raise_if_failed(self) -> None:
        """Raise what has ended the publication under way, if anything has that is not an engine's."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    async def close(self) -> None:
        """Leave the weight group."""
        await self._publisher.close()

    async def _publish(self, publication: Publication, directive: Directive) -> None:
        await self._link.raise_if_fenced()
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
                send_s=report.send_s,
                total_s=report.total_s,
                directive=directive.answers,
            )
        )
        if requested := [url for url in directive.to_verify if url in report.pauses_s]:
            findings = await self._canary_checker.check(requested, report, self._forward)
            await self._link.report(
                CanaryChecked(
                    epoch=report.epoch,
                    model_version=report.version,
                    membership=publication.membership,
                    worst=findings.worst,
                    mismatched=findings.mismatched,
                    failed=findings.failed,
                    permanent=sorted(findings.permanent),
                )
            )

    async def _forward(self, batch: MicroBatch) -> Float32:
        loop = asyncio.get_running_loop()
        (predictions,) = await loop.run_in_executor(self._worker, self._trainer.forward, [batch])
        return predictions
