"""The controller shows which parameter servers answer, and raises an alarm if a shard has none."""

from pipelinerl.errors import EngineUnreachable
from pipelinerl.plugins.parameter_server.watch import ServerWatch
from tests.controller.service.test_service import FACTS, running


def test_parameter_servers_are_down_after_two_missed_polls_and_a_shard_without_any_raises_an_alarm():
    urls = ["http://a", "http://b", "http://c", "http://d"]
    watch = ServerWatch(urls, shards=2, probe=None)
    for url in urls:
        assert watch.answered(url) == []
    assert watch.missed("http://c", "gone") == []
    (lost,) = watch.missed("http://c", "gone")
    assert lost == ("parameter_server_lost", {"url": "http://c", "shard": 1, "replica": 0, "reason": "gone"})
    assert watch.missed("http://c", "gone") == [] == watch.missed("http://d", "gone")
    lost, (alarm, fields) = watch.missed("http://d", "gone")
    assert lost[1]["replica"] == 1 and (alarm, fields["domain"]) == ("alarm", "shard 1")
    assert watch.alarms() == (fields["what"],) and "shard 1 answers (http://c, http://d)" in fields["what"]
    assert [(each.shard, each.replica, each.state) for each in watch.statuses()] == [
        (0, 0, "up"), (0, 1, "up"), (1, 0, "down"), (1, 1, "down"),
    ]  # fmt: skip
    assert [kind for kind, _ in watch.answered("http://d")] == ["parameter_server_back", "alarm_cleared"]
    assert watch.alarms() == ()
    assert [kind for kind, _ in watch.answered("http://c")] == ["parameter_server_back"]


def test_parameter_server_that_has_never_answered_may_start_for_half_a_minute():
    watch = ServerWatch(["http://a"], probe=None)
    silent = [watch.missed("http://a", "not yet") for _ in range(30)]
    assert [len(events) for events in silent] == [0] * 29 + [2]


async def test_lost_parameter_server_is_an_event_an_alarm_and_part_of_the_status(tmp_path):
    def transport_of(probe):
        return ServerWatch(["http://store:1"], probe=probe)

    async with running(tmp_path, transport_of=transport_of) as run:
        await run.until(lambda: run.service.status().parameter_servers[0].state == "up")
        run.probe.answer = EngineUnreachable("connection refused")
        await run.until(lambda: run.events("alarm"))
        shown = run.service.status()
        assert (shown.parameter_servers[0].state, shown.parameter_servers[0].last_error) == (
            "down", "connection refused"
        )  # fmt: skip
        assert "http://store:1" in shown.alarms[0] and "http://store:1" in shown.waiting_for
        run.probe.answer = FACTS
        await run.until(lambda: run.events("alarm_cleared"))
        assert run.service.status().alarms == ()
    assert [len(run.events(f"parameter_server_{what}")) for what in ("lost", "back")] == [1, 1]
