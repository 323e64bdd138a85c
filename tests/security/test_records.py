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
from pipelinerl.messages import DIRECTIVES, MOST_AHEAD, PROMPTS, GroupFailed, decode_directive, decode_report, encode
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


@pytest.mark.parametrize(("index", "model_version"), [(-1, 1), (2**53, 1), (2**62, 1), (1, -1), (1, 2**60)])
def test_rollout_group_with_an_impossible_index_or_model_version_raises_a_record_error(index, model_version):
    whole = group(1)
    turn = whole.rollouts[0].turns[0]
    spans = tuple(span._replace(model_version=model_version) for span in turn.spans)
    rollout = dataclasses.replace(whole.rollouts[0], turns=(dataclasses.replace(turn, spans=spans),))
    changed = dataclasses.replace(whole, index=index, rollouts=(rollout, *whole.rollouts[1:]))
    with pytest.raises(RecordError, match="index" if index != 1 else "version"):
        decode_group(encode_group(changed))


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


async def test_bytes_that_are_no_report_do_not_crash_the_controller(run):
    await run.start()
    await run.tell(NO_TEXT, DEEP)
    await run.tell(step(1))
    assert run.controller.state.version == 1 and run.stream_length(DEAD_LETTERS) == 2


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
    ("method", "path", "body", "who"),
    [
        ("PATCH", "/knobs", b'{"j": 1' + b"0" * 30 + b"}", "me"),
        ("PATCH", "/knobs", b'{"j": 1' + b"0" * 30 + b', "mode": "rlax"}', "me"),
        ("PATCH", "/knobs", b'{"k": 1' + b"0" * 400 + b"}", "me"),
        ("PATCH", "/knobs", b'{"j": 2}', "a" * 129),
        ("POST", "/engines", b'{"url": "http://127.0.0.1:9", "incarnation": "1", "name": "\\ud800"}', "me"),
    ],
    ids=["30 digits", "30 digits and a mode", "400 digits", "a long author", "half a character"],
)
async def test_request_that_the_journal_cannot_hold_is_rejected_and_changes_nothing(run, method, path, body, who):
    before = run.controller.state.knobs
    transport = httpx.ASGITransport(create_api(run.service, token=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        headers = {"content-type": "application/json", "x-who": who}
        answer = await http.request(method, path, content=body, headers=headers)
    state = run.controller.state
    assert answer.status_code == 422 and state.knobs == before
    assert state.knob_log == [] and state.fleet.records() == []
