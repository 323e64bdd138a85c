"""The trainer's exchange with the controller: accepted directives, their order, and resent reports."""

from __future__ import annotations

import asyncio

import pytest

from pipelinerl.errors import DeadlineError, FencedError
from pipelinerl.messages import (
    DIRECTIVES,
    EPOCHS,
    REPORTS,
    ROLLOUTS,
    ConsumedReport,
    Directive,
    StepDone,
    TrainerKnobs,
    TrainerReady,
    encode,
)
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import encode_group
from pipelinerl.training import controller_link
from pipelinerl.training.controller_link import ControllerLink
from pipelinerl.training.rollouts.rollout_reader import Arrivals, RolloutReader
from tests.fakes.rollouts import group
from tests.patience import PATIENCE_S

READY = TrainerReady(report_id="ready-me", incarnation="me", model_version=0, consumed=ConsumedReport())
STEP = StepDone(report_id="e2-step-1", epoch=2, model_version=1, consumed=ConsumedReport(), stats={})


@pytest.fixture
def stream() -> MemoryStream:
    return MemoryStream()


async def linked(stream: MemoryStream, *, deadline_s: float = 10.0) -> ControllerLink:
    reader = RolloutReader(stream, offsets={}, rescan_s=0.0)
    await reader.start()
    return ControllerLink(stream, reader, deadline_s=deadline_s)


async def say(stream: MemoryStream, *answers: str, epoch: int = 2) -> None:
    knobs = TrainerKnobs(k=1, learning_rate=0.1, rollouts_per_step=1)
    directives = [
        Directive(
            answers=each, epoch=epoch, knobs=knobs, publish_to=[], membership=0, failed=[], checkpoint=False, stop=False
        )
        for each in answers
    ]
    await stream.append(DIRECTIVES, [encode(directive) for directive in directives])


async def answered(link: ControllerLink, question: TrainerReady | StepDone) -> list[Arrivals]:
    async with asyncio.timeout(PATIENCE_S):
        return [arrivals async for arrivals in link.wait_for_answer(question)]


def said(arrivals: list[Arrivals]) -> list[str]:
    return [directive.answers for each in arrivals for directive in each.directives]


async def test_answer_counts_once_and_unsolicited_directives_count_in_order(stream: MemoryStream) -> None:
    link = await linked(stream)
    await say(stream, "knobs-e2-0", "ready-other", "ready-me", "ready-me", "knobs-e2-1")
    assert said(await answered(link, READY)) == ["ready-me", "knobs-e2-1"], "before the first answer nothing counts"
    await say(stream, "knobs-e2-2", "ready-me", "e2-skip-0-1", "e2-step-1", "e2-step-1", "knobs-e2-3")
    assert said(await answered(link, STEP)) == ["knobs-e2-2", "e2-step-1", "knobs-e2-3"]
    assert link.current.answers == "knobs-e2-3"
    await say(stream, "stop-e1", epoch=1)
    assert said([await link.read()]) == [], "an earlier epoch is ignored"


async def test_rollouts_are_read_only_after_the_first_answer(
    stream: MemoryStream,
) -> None:
    link = await linked(stream)
    await stream.append(ROLLOUTS + "a", [encode_group(group(3))], first_id=1)
    await say(stream, "ready-me")
    assert [each.groups for each in await answered(link, READY)] == [[]]
    await say(stream, "e2-step-1")
    (arrivals,) = await answered(link, STEP)
    assert [each.index for each in arrivals.groups] == [3] and said([arrivals]) == ["e2-step-1"]


async def test_report_is_resent_until_its_deadline(stream: MemoryStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_link, "RESEND_S", 0.05)
    monkeypatch.setattr(controller_link, "_BLOCK_S", 0.02)
    link = await linked(stream, deadline_s=0.3)
    with pytest.raises(DeadlineError, match=r"for the controller to answer ready-me; is the controller running"):
        await answered(link, READY)
    assert 2 <= await stream.length(REPORTS) <= 6


async def test_later_epoch_fences_the_link_when_reading_and_before_writing(stream: MemoryStream) -> None:
    link = await linked(stream)
    await say(stream, "ready-me")
    await answered(link, READY)
    await stream.append(EPOCHS, [b""], first_id=2)
    await link.raise_if_fenced()
    await stream.append(EPOCHS, [b""], first_id=3)
    with pytest.raises(FencedError, match="epoch 3 has taken over from epoch 2"):
        await link.raise_if_fenced()
    await say(stream, "ready-other", epoch=3)
    with pytest.raises(FencedError, match="epoch 3 has taken over from epoch 2"):
        await link.read()
