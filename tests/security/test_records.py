"""Hostile stream entries, written with the Redis password, are moved to the dead-letter stream and crash no process."""

import dataclasses

import httpx
import msgspec
import pytest

from pipelinerl.controller.service.api import create_api
from pipelinerl.controller.service.journal import JOURNAL, Journal
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered
from pipelinerl.errors import RecordError
from pipelinerl.messages import (
    DIRECTIVES,
    MOST_AHEAD,
    PROMPTS,
    ConsumedReport,
    GroupFailed,
    OrdersEnded,
    decode_directive,
    decode_report,
    encode,
)
from pipelinerl.observability.events import EventLog
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import Kind, _seal, decode_group, decode_order, encode_group
from pipelinerl.streams.stream import DEAD_LETTERS
from pipelinerl.training.rollouts.rollout_reader import RolloutReader
from tests.controller.service.test_service import Probe, running, step
from tests.controller.world import ENGINE, controller
from tests.fakes.rollouts import group

#: A message whose field `reason` is replaced by bytes that are invalid UTF-8.
NO_TEXT = encode(GroupFailed(order_id="x", index=1, purpose="training", reason="\u20ac")).replace(
    b"\xe2\x82\xac", b"\xff\xff\xff"
)
DEEP = b"\x81\xa4kind" + b"\x91" * 100_000


@pytest.fixture
async def run(tmp_path):
    async with running(tmp_path) as made:
        yield made


@pytest.mark.parametrize("payload", [NO_TEXT, DEEP, b"", b"\xc1", b"\x00" * 100])
def test_bytes_that_are_not_a_message_raise_a_decode_error(payload):
    for decode in (decode_report, decode_directive):
        with pytest.raises(msgspec.DecodeError):
            decode(payload)


def test_prompt_record_whose_header_is_invalid_utf8_or_incomplete_raises_a_record_error():
    record = _seal(Kind.ORDER, {"order_id": "aaaa"})
    header = msgspec.msgpack.encode({"order_id": "aaaa"}).replace(b"aaaa", b"\xff" * 4)
    with pytest.raises(RecordError):
        decode_order(_sealed(Kind.ORDER, header))
    with pytest.raises(RecordError):
        decode_order(record)
    with pytest.raises(RecordError):
        decode_group(_sealed(Kind.GROUP, b"\x91" * 100_000))


def _sealed(kind, header):
    return _seal(kind, msgspec.Raw(header))


@pytest.mark.parametrize("index", [-1, 2**53, 2**62])
def test_rollout_group_with_an_impossible_index_raises_a_record_error(index):
    with pytest.raises(RecordError, match="index"):
        decode_group(encode_group(dataclasses.replace(group(1), index=index)))


def test_rollout_group_with_impossible_model_versions_raises_a_record_error():
    whole = group(1)
    for change in ({"model_version": -1}, {"model_version": 2**60}):
        turn = whole.rollouts[0].turns[0]
        spans = tuple(span._replace(**change) for span in turn.spans)
        rollout = dataclasses.replace(whole.rollouts[0], turns=(dataclasses.replace(turn, spans=spans),))
        with pytest.raises(RecordError, match="version"):
            decode_group(encode_group(dataclasses.replace(whole, rollouts=(rollout, *whole.rollouts[1:]))))


async def test_trainer_skips_a_rollout_group_whose_index_is_far_above_any_requested_group():
    stream = MemoryStream()
    reader = RolloutReader(stream, offsets={}, rescan_s=0.0, frontier=lambda: 7)
    await reader.start()
    await stream.append(DIRECTIVES, [NO_TEXT, DEEP])
    far = dataclasses.replace(group(1), index=7 + MOST_AHEAD)
    await stream.append("rollouts:a", [encode_group(far), encode_group(group(3)), _sealed(Kind.GROUP, b"\xa1\xff")])
    groups = []
    for _ in range(3):
        groups += (await reader.read(block_s=0.1)).groups
    assert [each.index for each in groups] == [3]
    assert await stream.length(DEAD_LETTERS) == 4


async def test_hostile_reports_do_not_crash_the_controller(run):
    await run.start()
    forged = [
        OrdersEnded(epoch=1, model_version=0, consumed=ConsumedReport(trained=1, beyond=[2**62])),
        OrdersEnded(epoch=1, model_version=0, consumed=ConsumedReport(trained=1, frontier=2**62)),
    ]
    await run.tell(NO_TEXT, DEEP, *forged)
    await run.tell(step(1))
    assert run.controller.state.version == 1 and run.controller.state.account.cursor < 1000
    assert run.stream_length(DEAD_LETTERS) == 4


async def test_controller_restarts_even_if_the_prompt_stream_contains_unreadable_records(tmp_path):
    before, stream = controller(), MemoryStream()
    before.decide(EngineRegistered(now=0.0, url=ENGINE, incarnation="1"))
    await (await Journal.begin(stream)).snapshot(before.state)
    await stream.append(PROMPTS, [b"nothing", _sealed(Kind.ORDER, b"\xa1\xff")])
    with EventLog(tmp_path / "events.jsonl") as events:
        service = ControllerService(
            controller(), name="test", stream=stream, probe=Probe(), events=events, from_journal=True
        )
        recovered = await Journal.recover(stream)
        assert recovered is not None
        await service._continue(recovered)
    assert await stream.length(DEAD_LETTERS) == 2


@pytest.mark.parametrize("entry", [NO_TEXT, DEEP, b"", b"nothing"])
async def test_controller_ignores_its_whole_journal_if_one_entry_is_unreadable(entry):
    stream = MemoryStream()
    journal = await Journal.begin(stream)
    await journal.snapshot(controller().state)
    await stream.append(JOURNAL, [entry])
    assert await Journal.recover(stream) is None


@pytest.mark.parametrize(
    "body",
    [b'{"j": 1' + b"0" * 30 + b"}", b'{"j": 1' + b"0" * 30 + b', "mode": "rlax"}', b'{"k": 1' + b"0" * 400 + b"}"],
)
async def test_knob_is_not_changed_if_its_new_value_cannot_be_written_to_the_journal(run, body):
    before = run.controller.state.knobs
    transport = httpx.ASGITransport(create_api(run.service, token=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.patch("/knobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and run.controller.state.knobs == before
    assert run.controller.state.knob_log == []


async def test_knob_change_with_an_overlong_author_name_is_rejected(run):
    """The limit exists because the author is stored in the journal, in every snapshot and in the event log."""
    transport = httpx.ASGITransport(create_api(run.service, token=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        refused = await http.patch("/knobs", json={"j": 2}, headers={"x-who": "a" * 129})
    assert refused.status_code == 422 and run.controller.state.knob_log == []


async def test_engine_name_with_a_lone_surrogate_is_rejected(run):
    """JSON can contain a lone surrogate such as "\\ud800", which cannot be encoded as UTF-8."""
    transport = httpx.ASGITransport(create_api(run.service, token=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        headers = {"content-type": "application/json"}
        body = b'{"url": "http://127.0.0.1:9", "incarnation": "1", "name": "\\ud800"}'
        answer = await http.post("/engines", content=body, headers=headers)
    assert answer.status_code == 422 and run.controller.state.fleet.records() == []
