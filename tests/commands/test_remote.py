"""Requests to a live run, found by directory or URL; errors show the controller's message."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI, Header, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from pipelinerl.commands.remote import ControllerAddress, address_of, controller_of
from pipelinerl.config.recipe import write_layout
from pipelinerl.controller.client import ControllerClient
from pipelinerl.errors import AddressError, RecipeError, TokenRefused, UserError
from pipelinerl.observability.status import RunStatus
from pipelinerl.roles.process import TOKEN_VARIABLE
from pipelinerl.system.http_service import guard, refusal, refuse_in_one_shape
from tests.fakes.served import in_thread

KNOBS = {"knobs": {"j": 1, "k": "inf"}, "log": [{"time": 1.0, "step": 3, "who": "ada", "changes": {"k": "inf"}}]}


def application():
    app = FastAPI(openapi_url=None)

    @app.get("/status")
    async def status():
        return Response(RunStatus(run="tiny", step=3).to_json(), media_type="application/json")

    @app.get("/knobs")
    async def knobs():
        return KNOBS

    @app.patch("/knobs", response_model=None)
    async def patch(request: Request, x_who: str = Header()):
        body = await request.json()
        if "q" in body:
            return refusal(422, "unknown knob 'q'", code="invalid_knob")
        return JSONResponse({"knobs": body | {"who": x_who}, "effective": "now"})

    refuse_in_one_shape(app)
    guard(app, token="secret")
    return app


@pytest.fixture(scope="module")
def url():
    with in_thread(application()) as served:
        yield served


@pytest.fixture
def remote(url, tmp_path):
    (tmp_path / "controller.json").write_text(json.dumps({"url": url, "token": "secret"}))
    with controller_of(tmp_path) as made:
        yield made


def test_controller_client_decodes_responses_and_sends_the_users_name(tmp_path, remote, monkeypatch):
    monkeypatch.setenv("LOGNAME", "Zoë")
    assert remote.status() == RunStatus(run="tiny", step=3)
    answer = remote.knobs()
    assert answer.knobs == {"j": 1, "k": "inf"}
    assert [(change.step, change.who, change.changes) for change in answer.log] == [(3, "ada", {"k": "inf"})]
    with controller_of(tmp_path) as named:
        assert named.change_knobs({"k": 4}).knobs == {"k": 4, "who": "Zo?"}


def test_error_for_a_run_without_a_controller_says_in_what_state_the_run_is(tmp_path):
    def error_for(run):
        with pytest.raises(UserError, match=f"{run} has no live run: ") as refused:
            address_of(run)
        return str(refused.value).partition("live run: ")[2]

    assert error_for(tmp_path / "absent") == "there is no such directory"
    assert error_for(tmp_path) == "it is not a run's directory: recipe.toml is missing"
    (tmp_path / "tokens.json").touch()  # as `pipelinerl redis` leaves the directory
    assert error_for(tmp_path).startswith("its controller has not started yet; start it with pipelinerl controller")
    (tmp_path / "recipe.toml").write_text("")
    write_layout(tmp_path)
    assert error_for(tmp_path) == f"it is starting or has crashed; pipelinerl run --resume {tmp_path} continues it"
    endings = (("run_finished", "it has finished (done)"), ("run_suspended", "it has ended (done); pipelinerl run"))
    for kind, words in endings:
        (tmp_path / "events.jsonl").write_text(json.dumps({"kind": kind, "time": 1, "reason": "done"}) + "\n")
        assert error_for(tmp_path).startswith(words)


def test_command_reaches_a_run_on_another_machine_by_the_url_of_its_controller(url, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert address_of(f"{url}/") == ControllerAddress(url, "secret")
    with controller_of(url) as controller:
        assert controller.status().step == 3
    monkeypatch.delenv(TOKEN_VARIABLE)
    with controller_of(url) as stranger, pytest.raises(TokenRefused, match="a valid bearer token is required"):
        stranger.status()


def test_rejected_request_to_a_run_shows_the_controllers_message(remote, url):
    with pytest.raises(RecipeError, match=r"^unknown knob 'q'$"):
        remote.change_knobs({"q": 1})
    with ControllerClient(url, None) as stranger, pytest.raises(TokenRefused, match="a valid bearer token is required"):
        stranger.status()
    with pytest.raises(RecipeError, match="POST /stop: Not Found"):
        remote.stop()


@pytest.mark.parametrize(
    "record",
    [
        None, "", "{", "[]", "{}", '{"url": 3, "token": null}', '{"url": "http://x"}', "\udcff",
        '{"url": "\udcff", "token": null}', '{"x": ' + "[" * 10**5,
    ],
)  # fmt: skip
def test_directory_without_a_valid_controller_address_has_no_live_run(tmp_path, record):
    if record is not None:
        (tmp_path / "controller.json").write_text(record, errors="surrogateescape")
    with pytest.raises(UserError, match=f"{tmp_path} has no live run"):
        controller_of(tmp_path)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "ht!tp://x", "http://[", "", "http://127.0.0.1:port", "http://" + "a" * 70]
)
def test_error_about_an_unreachable_controller_asks_whether_the_run_has_ended(address):
    with (
        pytest.raises(AddressError, match=r"does not answer .*; has the run ended\?"),
        ControllerClient(address, "secret") as controller,
    ):
        controller.status()


def test_client_detects_that_the_server_at_a_dead_controllers_address_is_not_a_controller():
    app = FastAPI(openapi_url=None)
    app.get("/status")(lambda: HTMLResponse("<html>"))
    app.get("/knobs")(lambda: {"detail": "something else"})
    app.post("/stop")(lambda: HTMLResponse("no", status_code=500))
    app.get("/engines")(lambda: HTMLResponse(b'{"error": {"message": "\xff"}}', status_code=500))
    with in_thread(app) as url, ControllerClient(url, "secret") as remote:
        for ask in (remote.status, remote.knobs, remote.stop, remote.engines):
            with pytest.raises(AddressError, match=r"the server at .* is not a controller"):
                ask()
