"""`Publishing`: at most one publication of weights under way beside the step, and the report of how it went."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, final

from inference_contract.schemas import OnUpdate, WeightLayout
from pipelinerl.errors import UpdateError
from pipelinerl.messages import CanaryChecked, ControlMessage, Directive, Published
from pipelinerl.training.publish.canary_check import CanaryChecker, Forward
from pipelinerl.weights.publisher import Publication, Publisher, PublishReport

log = logging.getLogger("pipelinerl")


@final
class Publishing:
    """Takes the trainer's weights to the engines, and has those prove them that the controller does not trust yet.

    One that fails is reported, engine by engine; training goes on.
    """

    def __init__(
        self,
        publisher: Publisher,
        canary_checker: CanaryChecker,
        *,
        forward: Forward,
        weights: Callable[[], Iterator[tuple[str, Any]]],
        layout: WeightLayout,
        on_update: OnUpdate,
        timeout_s: float,
        report: Callable[[ControlMessage], Awaitable[None]],
        raise_if_fenced: Callable[[], Awaitable[None]],
    ) -> None:
        self._publisher = publisher
        self._canary_checker = canary_checker
        self._forward = forward
        self._weights = weights
        self._layout = layout
        self._on_update = on_update
        self._timeout_s = timeout_s
        self._report = report
        self._raise_if_fenced = raise_if_fenced
        self._under_way: asyncio.Task[None] | None = None

    async def begin(self, version: int, directive: Directive) -> None:
        """Publish the weights, which are of `version`, to whom the directive says, once the one before has ended."""
        await self.finish()
        self._under_way = asyncio.create_task(self._publish(version, directive))

    async def finish(self) -> None:
        """Wait for what is under way: weights may change only afterwards."""
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

    async def _publish(self, version: int, directive: Directive) -> None:
        publication = Publication(
            version=version,
            epoch=directive.epoch,
            layout=self._layout,
            weights=self._weights,
            engines=directive.publish_to,
            membership=directive.membership,
            on_update=self._on_update,
            timeout_s=self._timeout_s,
        )
        await self._raise_if_fenced()
        try:
            report = await self._publisher.publish(publication)
        except UpdateError as error:
            log.error("publication of version %d failed: %s", publication.version, error)
            report = PublishReport.failure(publication, str(error))
        await self._report(
            Published(
                epoch=report.epoch,
                model_version=report.version,
                membership=directive.membership,
                pauses_s=dict(report.pauses_s),
                failed=dict(report.failed),
                send_s=report.send_s,
                total_s=report.total_s,
            )
        )
        if asked := [url for url in directive.to_verify if url in report.pauses_s]:
            findings = await self._canary_checker.check(asked, report, self._forward)
            await self._report(
                CanaryChecked(
                    epoch=report.epoch,
                    model_version=report.version,
                    membership=directive.membership,
                    worst=findings.worst,
                    mismatched=findings.mismatched,
                    failed=findings.failed,
                )
            )
