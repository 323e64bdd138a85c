"""The page of `pipelinerl watch` changes a live run through its controller, and shows runs without a controller."""

import asyncio
import json
from contextlib import contextmanager

import httpx
import msgspec

from pipelinerl.enums import HOTTEST
from pipelinerl.observability.status import RunStatus
from pipelinerl.plugins.watch.steering import Steering
from tests.controller.world import ENGINE
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S
from tests.plugins.watch.run_files import TOKEN, served_controller, served_page, written_run


async def ask(page, method, path, body=None, *, content=None):
    def send():
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        given = content if content is not None else json.dumps(body).encode()
        return httpx.request(
            method, page.url + path, content=given, headers=headers, trust_env=False, timeout=PATIENCE_S
        )

    return await asyncio.to_thread(send)


def refusal_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


async def test_page_changes_a_live_run_unless_the_page_is_read_only(tmp_path):
    run_dir = written_run(tmp_path / "run", steps=3, end=False, overrides=["sampling.group_size=2"])
    (tmp_path / "controller").mkdir()
    async with served_controller(run_dir, tmp_path / "controller") as (run, _):
        with served_page(run_dir) as page:
            await check_knob_changes(page, run)
            await check_values_that_json_cannot_represent_are_rejected(page, run)
            await check_engine_changes(page)
        with served_page(run_dir, read_only=True) as page:
            await check_read_only_page_changes_nothing(page, run)
    with served_page(run_dir) as page:
        await check_silent_controller_is_reported(page)


async def check_knob_changes(page, run):
    run_info = (await ask(page, "GET", "/api/run")).json()
    assert (run_info["state"], run_info["may_steer"], run_info["why_not"]) == ("live", True, "")
    knobs = (await ask(page, "GET", "/api/knobs")).json()
    assert knobs["source"] == "controller" and knobs["may_steer"] and "rlax" in knobs["modes"]
    by_name = {each["name"]: each for each in knobs["knobs"]}
    assert by_name["k"]["may_be_infinite"] and by_name["temperature"]["most"] == HOTTEST
    assert by_name["rollouts_per_step"]["step"] == 2 and "domain_weights.a" in by_name
    check = (await ask(page, "POST", "/api/knobs/check", {"temperature": -1, "k": 3})).json()
    assert not check["ok"] and [each["knob"] for each in check["refused"]] == ["temperature"]
    assert "temperature must be" in check["refused"][0]["message"]
    unknown = (await ask(page, "POST", "/api/knobs/check", {"kk": 1})).json()
    assert "unknown knob" in unknown["refused"][0]["message"]
    fine = (await ask(page, "POST", "/api/knobs/check", {"temperature": 0.5})).json()
    assert fine["ok"] and run.controller.state.knobs.temperature != 0.5, "nothing was changed"
    changed = (await ask(page, "PATCH", "/api/knobs", {"temperature": 0.5})).json()
    assert run.controller.state.knobs.temperature == 0.5
    assert changed["log"][-1]["changes"] == {"temperature": 0.5} and changed["log"][-1]["who"]
    refused = await ask(page, "PATCH", "/api/knobs", {"temperature": -1})
    assert refusal_of(refused) == (422, "refused") and "temperature" in refused.json()["error"]["message"]


async def check_values_that_json_cannot_represent_are_rejected(page, run):
    """Check that the page neither accepts as valid nor applies knob values that JSON cannot represent."""
    before = run.controller.state.knobs
    for body in (b'{"k": NaN}', b'{"k": 1e999}', b'{"k": [NaN]}', b'{"k": "\\ud800"}', b'{"\\udfff": 1}'):
        for method, path in (("POST", "/api/knobs/check"), ("PATCH", "/api/knobs")):
            answer = await ask(page, method, path, content=body)
            refused = answer.status_code == 422 or not answer.json().get("ok", True)
            assert refused and answer.status_code in (200, 422), (body, path, answer.status_code)
    assert run.controller.state.knobs == before


async def check_engine_changes(page):
    engines = (await ask(page, "GET", "/api/engines")).json()
    assert engines["engines"][0]["url"] == ENGINE and "bigram" in engines["types"] and engines["may_steer"]
    added = (await ask(page, "POST", "/api/engines/add", {"type": "torch", "count": 2})).json()
    assert added == {"state": "asked", "names": ["engine-1", "engine-2"]}
    swapped = (await ask(page, "POST", "/api/engines/swap", {"engine": ENGINE, "type": "torch"})).json()
    assert swapped["names"] == ["engine-3"]
    removed = await ask(page, "POST", "/api/engines/remove", {"engine": "engine-2"})
    assert removed.json() == {"state": "removed"}
    unknown = await ask(page, "POST", "/api/engines/drain", {"engine": "nobody"})
    assert refusal_of(unknown) == (422, "refused") and "exactly one engine" in unknown.json()["error"]["message"]
    for wrong in ({}, {"url": "http://a:1", "type": "torch"}):
        assert (await ask(page, "POST", "/api/engines/add", wrong)).status_code == 422
    assert (await ask(page, "GET", "/api/now")).json()["fleet"]["engines"][0]["url"] == ENGINE


async def check_read_only_page_changes_nothing(page, run):
    run_info = (await ask(page, "GET", "/api/run")).json()
    assert run_info["state"] == "live" and not run_info["may_steer"] and "--read-only" in run_info["why_not"]
    before = run.controller.state.knobs
    for method, path, body in (
        ("PATCH", "/api/knobs", {"temperature": 0.9}),
        ("POST", "/api/engines/add", {"type": "torch"}),
        ("POST", "/api/engines/swap", {"engine": ENGINE, "type": "torch"}),
        ("POST", "/api/engines/drain", {"engine": ENGINE}),
        ("POST", "/api/engines/remove", {"engine": ENGINE}),
        ("POST", "/api/stop", {}),
    ):
        assert refusal_of(await ask(page, method, path, body)) == (403, "read_only"), path
    assert run.controller.state.knobs == before and not run.controller.state.stop_reason
    assert (await ask(page, "GET", "/api/knobs")).json()["knobs"], "a read-only page still shows the knobs"


async def check_silent_controller_is_reported(page):
    """Check that the page reports the stopped controller, whose address is still in the run directory."""
    run_info = (await ask(page, "GET", "/api/run")).json()
    assert run_info["step"] == 3 or run_info["loading"]["events"] < 1.0
    assert not run_info["may_steer"] and "no controller answers" in run_info["why_not"]
    assert refusal_of(await ask(page, "PATCH", "/api/knobs", {"k": 1})) == (502, "controller_silent")
    knobs = (await ask(page, "GET", "/api/knobs")).json()
    assert knobs["source"] == "events" and not knobs["may_steer"]
    engines = (await ask(page, "GET", "/api/engines")).json()
    assert engines["source"] == "events"


async def test_page_cannot_change_a_run_without_a_controller(finished_run):
    with served_page(finished_run) as page:
        for path, body in (("/api/stop", {}), ("/api/knobs/check", {"k": 1})):
            assert refusal_of(await ask(page, "POST", path, body)) == (409, "no_controller"), path


@contextmanager
def status_only(run_dir):
    """Serve the status of a fake controller for the run; yield the addresses of clients that requested it."""
    connections = []
    status = msgspec.json.encode(RunStatus(run="x", step=1, total_steps=2, model_version=1))

    async def answers(scope, _, send):
        if scope["type"] == "http":
            connections.append(scope["client"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": status})

    with in_thread(answers) as url:
        (run_dir / "controller.json").write_text(json.dumps({"url": url, "token": None}))
        yield connections


def test_page_caches_the_status_of_a_run_and_reconnects_to_a_controller_at_a_new_address(tmp_path):
    run_dir = written_run(tmp_path / "run", steps=1, end=False)
    steering = Steering(run_dir)
    try:
        with status_only(run_dir) as connections:
            assert all(steering.status(max_age_s=PATIENCE_S) is not None for _ in range(3)) and len(connections) == 1
            assert steering.status(max_age_s=0.0) is not None and len(connections) == 2
            assert len(set(connections)) == 1, "the connection was reused"
            steering.close()
            assert steering.status(max_age_s=0.0) is not None and len(set(connections)) == 2
        assert steering.status(max_age_s=0.0) is None
        with status_only(run_dir) as connections:
            assert steering.status(max_age_s=0.0) is not None and len(connections) == 1
            steering.close()
    finally:
        steering.close()
