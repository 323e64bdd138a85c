"""Tests of the controller's routes with a running service: their effects and their errors."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from pipelinerl.controller.routes import LAUNCHER, LEASE_S, OFFER_S, OFFERS_AT_ONCE
from pipelinerl.controller.service import api, service as service_module
from pipelinerl.controller.service.api import MOST_SERVICES, create_api
from pipelinerl.controller.service.journal import JOURNAL, Journal
from pipelinerl.controller.service.service import VerifierLeases
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered
from pipelinerl.controller.state.lag import Turns
from pipelinerl.errors import EngineUnreachable
from pipelinerl.messages import DIRECTIVES
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.status import RunStatus
from pipelinerl.streams.memory_stream import MemoryStream
from tests.controller.service.test_service import running, served, service_on, step
from tests.controller.world import ENGINE, controller
from tests.fakes.verifier_service import lease
from tests.patience import PATIENCE_S

TOKEN = "run-token"


@pytest.fixture
async def run(tmp_path):
    async with running(tmp_path) as made:
        yield made


@pytest.fixture
async def http(run):
    headers = {"authorization": f"Bearer {TOKEN}", "x-who": "ada"}
    transport = httpx.ASGITransport(create_api(run.service, token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://controller", headers=headers) as client:
        yield client


async def test_status_names_a_full_disk_and_an_outage_of_the_stream_server_as_the_blocker(tmp_path):
    """Otherwise the status would name the actor, which is silent because it waits, too."""
    stream = MemoryStream()
    with EventLog(tmp_path / "events.jsonl") as events:
        service = service_on(stream, events, from_journal=True)
        assert service.status().waiting_for.startswith("an engine")
        stream.outage = "does not answer"
        assert service.status().waiting_for == "the stream server, which does not answer"
        events.no_room = "events.jsonl: No space left on device"
        assert service.status().waiting_for == "room (events.jsonl: No space left on device)"


async def test_restarted_controller_answers_requests_only_after_its_state_is_restored(tmp_path):
    """An answer with an empty fleet would make every actor give up its work at all engines."""
    before, stream = controller(), MemoryStream()
    before.decide(EngineRegistered(now=0.0, url=ENGINE, incarnation="1"))
    await (await Journal.begin(stream)).snapshot(before.state)
    with EventLog(tmp_path / "events.jsonl") as events:
        service = service_on(stream, events, from_journal=True)
        transport = httpx.ASGITransport(create_api(service, token=None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asking = asyncio.gather(*(http.get(path) for path in ("/assignment", "/status", "/knobs")))
            await asyncio.sleep(0.05)
            assert not asking.done()
            async with served(service):
                assignment, status, knobs = await asyncio.wait_for(asking, PATIENCE_S)
    assert assignment.json()["finishing"] == [ENGINE]
    assert [engine.url for engine in RunStatus.from_json(status.content).fleet.engines] == [ENGINE]
    assert knobs.status_code == 200


async def test_patched_knobs_take_effect_and_are_logged_with_their_author(run, http):
    await run.start()
    answer = await http.patch("/knobs", json={"k": "inf", "j": 2})
    assert (answer.status_code, answer.json()["knobs"]["k"]) == (200, "inf")
    assert answer.json()["effective"] == "at the next step boundary"
    shown = (await http.get("/knobs")).json()
    assert shown["knobs"] == run.state.knobs.to_json()
    assert [(change["who"], change["changes"]) for change in shown["log"]] == [("ada", {"k": "inf", "j": 2})]
    await run.tell(step(1))
    assert (await run.directives())[-1].knobs.k == float("inf")


@pytest.mark.parametrize(
    ("body", "status", "code", "sentence"),
    [
        (b"{k: 3}", 400, "invalid_json", "the body must be JSON"),
        (b"", 422, "invalid_request_error", "body: "),
        (b"null", 422, "invalid_request_error", "body: "),
        (b'{"q": 1}', 422, "invalid_knob", "unknown knob 'q'"),
        (b'{"j": ' + b"9" * 4000 + b"}", 422, "invalid_knob", "j must be a whole number"),
        (b'{"k": NaN}', 422, "invalid_request_error", "body: 'k' must be a finite number"),
        (b'{"k": 1e999}', 422, "invalid_request_error", "body: 'k' must be a finite number"),
        (b'{"k": "1e999"}', 422, "invalid_knob", "k must be a number, got '1e999'"),
        (b'{"domain_weights": {"a": -Infinity}}', 422, "invalid_request_error", "body: 'domain_weights' must be"),
        (b'{"mode": "\\ud800"}', 422, "invalid_request_error", "body: 'mode' and its value must be Unicode"),
    ],
)
async def test_patch_of_invalid_knobs_is_rejected_and_changes_nothing(run, http, body, status, code, sentence):
    before = run.state.knobs
    answer = await http.patch("/knobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and error["message"].startswith(sentence)
    assert len(answer.content) < 400
    assert (run.state.knobs, run.state.knob_log) == (before, [])


async def test_engine_with_the_name_of_a_live_engine_is_rejected_until_that_one_is_gone(run, http):
    first = {"url": ENGINE, "incarnation": "1", "name": "engine-0"}
    second = first | {"url": "http://127.0.0.1:7002", "incarnation": "2"}
    await http.post("/engines", json=first)
    answer = await http.post("/engines", json=second)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
    assert answer.json()["error"]["message"] == (
        f"name: the engine at {ENGINE} is 'engine-0' already; start this one with another --name"
    )
    assert (await http.post("/engines", json=first)).json() == {"state": "joining"}, "the engine itself keeps its name"
    await http.delete("/engines", params={"engine": ENGINE})
    assert (await http.post("/engines", json=second)).json() == {"state": "joining"}


async def test_repeated_registration_of_an_engine_is_journaled_only_if_its_process_restarted(run, http):
    offer = {"url": ENGINE, "incarnation": "1", "name": "engine-0", "type": "torch"}
    await http.post("/engines", json=offer)
    entries = run.stream_length(JOURNAL)
    assert (await http.post("/engines", json=offer)).json() == {"state": "joining"}
    assert run.stream_length(JOURNAL) == entries and len(run.events("engine_joined")) == 1
    await http.post("/engines", json=offer | {"incarnation": "2"})
    assert run.stream_length(JOURNAL) == entries + 1, "a restarted process is journaled"


async def test_engines_of_a_large_fleet_renew_their_registrations_less_often(run, http):
    for number in range(2 * OFFERS_AT_ONCE):
        run.state.fleet.join(f"http://10.0.0.1:{9000 + number}", "1")
    answer = await http.post("/engines", json={"url": "http://10.0.0.1:9000", "incarnation": "1"})
    assert answer.json() == {"state": "joining", "again_s": 2 * OFFER_S}


async def test_engine_learns_soon_on_which_cores_it_takes_turns_with_the_trainer(run, http):
    offer = {"url": ENGINE, "incarnation": "1"}
    run.controller.settings = replace(run.controller.settings, cores=(0, 1))
    run.controller.state.knobs = replace(run.controller.state.knobs, j=None)
    run.controller.state.lag.turns = Turns.first()
    await http.post("/engines", json=offer)
    assert (await http.post("/engines", json=offer)).json() == {
        "state": "joining", "again_s": OFFER_S / 4, "cores": [0, 1]
    }  # fmt: skip
    run.controller.state.lag.turns = Turns()
    assert "cores" not in (await http.post("/engines", json=offer)).json()


def from_host(run, host):
    transport = httpx.ASGITransport(create_api(run.service, token=TOKEN), client=(host, 40_000))
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=transport, base_url="http://controller", headers=headers)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.1.1", "localhost", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"]
)
async def test_loopback_engine_or_verifier_may_only_join_from_the_controllers_own_machine(run, host):
    """Engines on different machines with the same loopback address would replace each other repeatedly."""
    offer = {"url": f"http://{host}:8001", "incarnation": "1"}
    async with from_host(run, "10.0.0.7") as away:
        for path, what in (("/engines", "engine"), ("/verifiers", "verifier")):
            refused = await away.post(path, json=offer | {"domains": {"words": "r1"}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (422, "url")
            assert f"start the {what} with --host" in refused.json()["error"]["message"]
        assert run.state.fleet.records() == []
        for url in ("http://10.0.0.7:8001", "http://[fd00::7]:8001", "http://gpu-1.lab:8001"):
            assert (await away.post("/engines", json={"url": url})).status_code == 200
    for here in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        async with from_host(run, here) as local:
            assert (await local.post("/engines", json=offer)).json() == {"state": "joining"}


@pytest.mark.parametrize("incarnation", ["", "1"], ids=["added by an operator", "offers itself"])
async def test_registration_of_an_engine_that_does_not_answer_or_hangs_is_rejected(run, http, monkeypatch, incarnation):
    """Without this check, only the next publication would notice the dead engine, and would delay all other engines."""
    monkeypatch.setattr(api, "_PROBE_S", 0.05)
    offer = {"url": ENGINE, "incarnation": incarnation}
    run.probe.answer = EngineUnreachable("connection refused")
    dead = await http.post("/engines", json=offer)
    run.probe.off.add(ENGINE)
    hanging = await http.post("/engines", json=offer)
    reasons = {dead: "connection refused", hanging: "no answer within 0.05 s"}
    for refused, reason in reasons.items():
        assert refused.status_code == 422 and refused.json()["error"]["message"].endswith(f"answers there: {reason}")
    assert run.state.fleet.records() == []


async def test_launcher_counts_as_present_while_it_polls_the_status(run, http):
    assert (await http.get("/engines")).json()["has_launcher"], "one may be about to ask"
    run.service._launcher_at -= 60.0
    await http.get("/status")
    assert not (await http.get("/engines")).json()["has_launcher"]
    await http.get("/status", headers={"x-who": LAUNCHER})
    assert (await http.get("/engines")).json()["has_launcher"]


NO_URLS = (
    None, "", "engine-0", "ftp://host:1", "http://", "http://user:secret@host:1", "http://host:1/path", "http://:8001",
    "http://host:1?x=1", "http://host:1\nx", "http://" + "h" * 300, "http://gpu..box:8001", f"http://{'h' * 64}:8001",
    "http://[::1:8001", "http://host:65536", "http://host:x",
)  # fmt: skip
VERIFIER = {"url": "http://127.0.0.1:8200", "incarnation": "1", "domains": {"words": "r1"}}
#: Path, body, and the parameter that the error must name.
INVALID = [
    ("/engines", {}, "url"),
    *(("/engines", {"url": url}, "url") for url in NO_URLS),
    *(("/engines", {"url": ENGINE, "incarnation": each}, "incarnation") for each in ("x" * 65, 1)),
    ("/engines/request", {}, "type"),
    ("/engines/request", {"type": "../x"}, "type"),
    ("/engines/request", {"type": "torch", "count": 0}, "count"),
    ("/engines/drain", {}, "engine"),
    ("/engines/drain", {"engine": ENGINE, "grace_s": -1}, "grace_s"),
    *(("/verifiers", VERIFIER | {"url": url}, "url") for url in ("file:///etc", "http://user:secret@a:1")),
    *(("/verifiers", VERIFIER | {"domains": each}, "domains") for each in ({}, {"x" * 257: "r"})),
    ("/verifiers", VERIFIER | {"incarnation": ""}, "incarnation"),
]


@pytest.mark.parametrize(("path", "body", "param"), INVALID)
async def test_requests_with_an_invalid_field_are_rejected_with_its_name(run, http, path, body, param):
    answer = await http.post(path, json=body)
    assert answer.status_code == 422 and answer.json()["error"]["param"].startswith(param)
    assert "secret" not in answer.text
    assert run.state.fleet.records() == [] and run.service.status().fleet.requested == ()


async def test_removing_an_unknown_engine_is_an_error(run, http):
    await http.post("/engines", json={"url": ENGINE})
    answer = await http.delete("/engines", params={"engine": "http://other"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "unknown_engine", "engine")
    assert error["message"].endswith(f"that URL or name; engines are: unnamed at {ENGINE}")
    assert (await http.delete("/engines")).json()["error"]["param"] == "engine"
    assert (await http.post("/engines/drain", json={"engine": "http://other"})).status_code == 404


async def test_engines_can_be_requested_drained_and_removed_by_name_or_url(run, http):
    requested = await http.post("/engines/request", json={"type": "bigram", "count": 2})
    assert requested.json() == {"names": ["engine-1", "engine-2"]}, "the run began with one"
    assert [each.name for each in run.service.status().fleet.requested] == ["engine-1", "engine-2"]
    await http.post("/engines", json={"url": ENGINE, "incarnation": "1", "name": "engine-1", "type": "bigram"})
    (listed,) = run.service.status().fleet.engines
    assert (listed.url, listed.name, listed.type, listed.state) == (ENGINE, "engine-1", "bigram", "joining")
    assert (await http.post("/engines/drain", json={"engine": "engine-1"})).json() == {"state": "draining"}
    assert (await http.delete("/engines", params={"engine": "engine-2"})).json() == {"state": "removed"}
    assert run.service.status().fleet.to_stop == ("engine-2",), "it had not come yet, and is not wanted any more"
    assert (await http.delete("/engines", params={"engine": ENGINE})).status_code == 200
    status = run.service.status().fleet
    assert (status.to_stop, status.requested) == (("engine-1", "engine-2"), ())


async def test_second_request_to_replace_an_engine_that_is_leaving_is_rejected_as_a_conflict(run, http):
    await run.start()
    swap = {"type": "torch", "replaces": ENGINE}
    assert (await http.post("/engines/request", json=swap)).json() == {"names": ["engine-1"]}
    again = await http.post("/engines/request", json=swap)
    error = again.json()["error"]
    assert (again.status_code, error["code"], error["param"]) == (409, "engine_going", "replaces")
    assert error["message"].startswith(f"{ENGINE} is leaving already: engine-1, which can be removed, was requested")
    await http.delete("/engines", params={"engine": "engine-1"})
    await http.post("/engines/drain", json={"engine": ENGINE})
    again = await http.post("/engines/request", json=swap)
    assert again.status_code == 409 and "it is being drained" in again.json()["error"]["message"]
    assert len(run.state.engine_requests) == 1


async def test_engine_urls_with_localhost_and_127_0_0_1_name_the_same_engine(run, http):
    await http.post("/engines", json={"url": "http://127.0.0.1:8001", "incarnation": "1", "name": "engine-0"})
    assert (await http.post("/engines", json={"url": "http://localhost:8001/"})).status_code == 200
    assert run.state.fleet.members() == ["http://127.0.0.1:8001"]
    assert (await http.delete("/engines", params={"engine": "http://localhost:8001"})).status_code == 200
    assert run.state.fleet.members() == []


async def test_drained_engine_is_removed_after_it_has_been_idle_for_a_while(run, http, monkeypatch):
    monkeypatch.setattr(service_module, "_IDLE_S", 0.1)
    await run.start()
    assert (await http.post("/engines/drain", json={"engine": ENGINE})).status_code == 200
    assignment = (await http.get("/assignment")).json()
    assert (assignment["serving"], assignment["finishing"]) == ([], [ENGINE])
    assert [engine["state"] for engine in (await http.get("/engines")).json()["engines"]] == ["draining"]
    run.probe.answer = {"slots": 4.0}
    await run.until(lambda: run.events("engine_lost"))
    assert run.events("engine_lost")[0]["reason"] == "drained" and run.events("engine_lost")[0]["planned"]
    assert (await http.get("/engines")).json()["engines"][0]["state"] == "left"
    (record,) = run.state.fleet.records()
    assert record.to_stop


async def test_repeated_stop_requests_send_one_stop_directive(run, http):
    await run.start()
    for _ in range(2):
        assert (await http.post("/stop")).json() == {"state": "stopping"}
    last = (await run.directives())[-1]
    assert (last.stop, last.checkpoint, last.answers) == (True, True, "stop-e1")
    assert run.stream_length(DIRECTIVES) == 2
    assert run.controller.ending == "stopped by ada"


async def test_actors_are_assigned_a_verifier_service_until_it_is_withdrawn(http):
    offer = {"url": "http://127.0.0.1:8200/", "incarnation": "1", "domains": {"words": "r1"}}
    for _ in range(2):
        assert (await http.post("/verifiers", json=offer)).json() == {"state": "leased"}
    expected = {"url": "http://127.0.0.1:8200", "incarnation": "1", "domains": {"words": "r1"}}
    assert (await http.get("/assignment")).json()["verifiers"] == [expected]
    assert (await http.delete("/verifiers", params={"url": offer["url"]})).json() == {"state": "removed"}
    assert (await http.get("/assignment")).json()["verifiers"] == []


def test_verifier_lease_ends_if_it_is_not_renewed_or_the_service_is_withdrawn():
    now = [0.0]
    leases = VerifierLeases(lambda: now[0])
    assert all(leases.offer(lease(f"http://a:{port}")) for port in range(1, MOST_SERVICES + 1))
    now[0] = LEASE_S - 1
    assert not leases.offer(lease("http://b:1")) and len(leases.current()) == MOST_SERVICES
    assert leases.offer(lease("http://a:1", life="2")), "one of them goes on"
    now[0] = LEASE_S
    assert leases.current() == (lease("http://a:1", life="2"),)
    assert leases.offer(lease("http://b:1"))
    leases.withdraw("http://unknown:1")
    leases.withdraw("http://b:1")
    assert [each.url for each in leases.current()] == ["http://a:1"]
