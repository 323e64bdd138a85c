"""The trainer's rollout reader loses no untrained group at a restart; a later trainer epoch locks out earlier ones."""

import asyncio

import pytest

from pipelinerl.errors import DeadlineError, FencedError
from pipelinerl.messages import (
    DIRECTIVES,
    EPOCHS,
    REPORTS,
    ROLLOUTS,
    ConsumedReport,
    StepDone,
    TrainerReady,
    encode,
)
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import DEAD_LETTERS, parse_id
from pipelinerl.training.rollouts import rollout_reader
from pipelinerl.training.rollouts.rollout_reader import ControllerLink, RolloutReader
from tests.fakes.directives import directive
from tests.fakes.rollouts import group
from tests.patience import PATIENCE_S

A, B = ROLLOUTS + "a", ROLLOUTS + "b"


@pytest.fixture
def stream():
    return MemoryStream()


async def started(stream, offsets=None):
    reader = RolloutReader(stream, offsets=offsets or {}, rescan_s=0.0)
    await reader.start()
    return reader


async def put(stream, partition, *indices):
    """Append groups to an actor's rollout stream as the actor does, with entry ids that the actor chooses."""
    first = parse_id(await stream.last_id(partition))[0] + 1
    await stream.append(partition, [encode_group(group(index)) for index in indices], first_id=first)


async def indices(reader):
    return [arrived.index for arrived in (await reader.read(block_s=0.0)).groups]


def safe(reader, untrained=()):
    """Return the stream offsets that a checkpoint stores while the groups with these indices are untrained."""
    return reader.safe_offsets(lambda index: index in untrained)


async def test_rollout_reader_reads_the_streams_of_actors_that_join_later(stream):
    reader = await started(stream)
    await put(stream, A, 1)
    assert await indices(reader) == [1]
    await put(stream, B, 2)
    await put(stream, A, 3)
    assert sorted(await indices(reader)) == [2, 3]
    assert await indices(reader) == []


@pytest.mark.parametrize(
    ("untrained", "again"),
    [((), []), ((4,), [4]), ((2,), [2, 3, 4]), ((1, 4), [1, 2, 3, 4]), ((3, 12), [3, 4, 12]), ((11,), [11, 12])],
)
async def test_groups_that_were_untrained_at_a_checkpoint_are_read_again_after_a_restart(stream, untrained, again):
    await put(stream, A, 1, 2, 3, 4)
    await put(stream, B, 11, 12)
    reader = await started(stream)
    assert sorted(await indices(reader)) == [1, 2, 3, 4, 11, 12]
    saved = safe(reader, untrained)
    assert sorted(await indices(await started(stream, saved))) == again


async def test_stream_offset_in_a_checkpoint_stays_before_both_copies_of_an_untrained_group(stream):
    """Either copy may be the one that trains: a second copy is usually dropped, but a first may come from abandoned
    weights.
    """
    await put(stream, A, 1, 2, 1)
    reader = await started(stream)
    await indices(reader)
    saved = safe(reader, (1,))
    assert await indices(await started(stream, saved)) == [1, 2, 1]


async def test_stream_offsets_saved_for_another_stream_server_are_ignored(stream):
    await put(stream, A, 1)
    reader = await started(stream)
    await indices(reader)
    saved = safe(reader)
    other = MemoryStream()
    await put(other, A, 5)
    moved = await started(other, saved)
    assert await indices(moved) == [5]
    before = await other.length(A)
    await moved.trim(saved, epoch=1)
    assert await other.length(A) == before, "nor may they trim"


async def test_trimming_drops_only_stream_entries_that_no_checkpoint_needs(stream):
    await put(stream, A, 1, 2, 3)
    reader = await started(stream)
    await indices(reader)
    saved = safe(reader, (3,))
    await reader.trim(saved, epoch=1)
    assert await indices(await started(stream, saved)) == [3]
    assert await stream.length(A) <= 2
    await reader.trim({}, epoch=1)
    assert await indices(await started(stream, saved)) == [3]


async def test_unreadable_entries_are_moved_to_the_dead_letter_stream_by_the_trainer(stream):
    good = encode_group(group(2))
    await stream.append(A, [b"nonsense", good[:-1], good])
    reader = await started(stream)
    await stream.append(DIRECTIVES, [b"\xc1", encode(directive("ready-1"))])
    arrived = await reader.read(block_s=0.0)
    assert [arrived_group.index for arrived_group in arrived.groups] == [2]
    assert [order.answers for order in arrived.directives] == ["ready-1"]
    assert await stream.length(DEAD_LETTERS) == 3
    saved = safe(reader)
    assert await indices(await started(stream, saved)) == []


async def test_restarted_trainer_ignores_controller_directives_sent_before_its_start(stream):
    await stream.append(DIRECTIVES, [encode(directive("ready-old"))])
    reader = await started(stream)
    await stream.append(DIRECTIVES, [encode(directive("ready-new"))])
    assert [order.answers for order in await reader.read_directives(block_s=0.0)] == ["ready-new"]
    assert (await reader.read(block_s=0.0)).directives == []


READY = TrainerReady(report_id="ready-me", incarnation="me", model_version=0, consumed=ConsumedReport())
STEP = StepDone(report_id="e2-step-1", epoch=2, model_version=1, consumed=ConsumedReport(), stats={})


async def linked(stream, *, deadline_s=10.0):
    reader = RolloutReader(stream, offsets={}, rescan_s=0.0)
    await reader.start()
    return ControllerLink(stream, reader, deadline_s=deadline_s)


async def say(stream, *answers, epoch=2):
    await stream.append(DIRECTIVES, [encode(directive(each, epoch=epoch)) for each in answers])


async def answered(link, question):
    async with asyncio.timeout(PATIENCE_S):
        return [arrivals async for arrivals in link.wait_for_answer(question)]


def ids_of(arrivals):
    return [directive.answers for each in arrivals for directive in each.directives]


async def test_trainer_gets_unsolicited_directives_and_one_answer_to_its_report_in_stream_order(stream):
    link = await linked(stream)
    await say(stream, "knobs-e2-0", "ready-other", "ready-me", "ready-me", "knobs-e2-1")
    assert ids_of(await answered(link, READY)) == ["ready-me", "knobs-e2-1"], "before the first answer nothing counts"
    await say(stream, "knobs-e2-2", "ready-me", "e2-skip-0-1", "e2-step-1", "e2-step-1", "knobs-e2-3")
    assert ids_of(await answered(link, STEP)) == ["knobs-e2-2", "e2-step-1", "knobs-e2-3"]
    assert link.current.answers == "knobs-e2-3"
    await say(stream, "stop-e1", epoch=1)
    assert ids_of([await link.read()]) == [], "an earlier epoch is ignored"


async def test_trainer_reads_no_rollouts_before_the_controllers_first_answer(stream):
    link = await linked(stream)
    await stream.append(ROLLOUTS + "a", [encode_group(group(3))], first_id=1)
    await say(stream, "ready-me")
    assert [each.groups for each in await answered(link, READY)] == [[]]
    await say(stream, "e2-step-1")
    (arrivals,) = await answered(link, STEP)
    assert [each.index for each in arrivals.groups] == [3] and ids_of([arrivals]) == ["e2-step-1"]


async def test_trainer_resends_an_unanswered_report_until_its_deadline(stream, monkeypatch):
    monkeypatch.setattr(rollout_reader, "RESEND_S", 0.05)
    monkeypatch.setattr(rollout_reader, "_BLOCK_S", 0.02)
    link = await linked(stream, deadline_s=0.3)
    with pytest.raises(DeadlineError, match=r"for the controller to answer ready-me; is the controller running"):
        await answered(link, READY)
    assert 2 <= await stream.length(REPORTS) <= 6


async def test_trainer_gets_a_fenced_error_once_a_trainer_of_a_later_epoch_has_started(stream):
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
