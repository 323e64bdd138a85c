"""Tests of `pipelinerl engines …`: its requests to the controller, how it waits for engines, and its output."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response
from typer.testing import CliRunner

from pipelinerl.commands.remote import address_of, controller_of
from pipelinerl.config.recipe import load, save, write_layout
from pipelinerl.errors import DeadlineError, UserError
from pipelinerl.observability.status import EngineStatus, FleetStatus, RequestedEngine
from pipelinerl.plugins.steering.engines import ManualStart, engines_app, gone, joined, table
from tests.fakes.scripted_engine import application
from tests.fakes.served import in_thread

URL = "http://127.0.0.1:7001"
DEAD = {"state": "dead", "last_error": "no answer"}


@dataclass
class Controller:
    """A fake controller: it records requests, and reports the next scripted state of every engine at each poll."""

    standings: dict[str, list[str]] = field(default_factory=dict)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    to_stop: tuple[str, ...] = ()
    has_launcher: bool = True

    def application(self):
        app = FastAPI(openapi_url=None)

        @app.get("/engines")
        async def engines() -> Response:
            now = {name: states.pop(0) if len(states) > 1 else states[0] for name, states in self.standings.items()}
            listed = tuple(
                EngineStatus(url=f"{URL}{i}", name=name, type="torch", state=state, version=3, last_error="why not")
                for i, (name, state) in enumerate(now.items())
                if state != "not there"
            )
            fleet = FleetStatus(engines=listed, to_stop=self.to_stop, has_launcher=self.has_launcher)
            return Response(msgspec.json.encode(fleet), media_type="application/json")

        @app.api_route("/engines", methods=["POST", "DELETE"])
        @app.post("/engines/{order}")
        async def order(request: Request) -> dict[str, Any]:
            body = await request.body()
            path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            self.requests.append((request.method, path, json.loads(body) if body else None))
            return {"names": ["engine-1"]} if path.endswith("/request") else {"state": "done"}

        return app


@pytest.fixture
def controller(tmp_path):
    made = Controller()
    with in_thread(made.application()) as url:
        (tmp_path / "controller.json").write_text(json.dumps({"url": url, "token": None}))
        yield made


def run(where, command, *arguments):
    result = CliRunner().invoke(engines_app, [command, str(where), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_engine_table_shows_present_and_requested_engines():
    busy = {"state": "healthy", "version": 7, "running": 3, "tokens_per_s": 9.6}
    listed = (EngineStatus(url=URL, name="engine-0", type="torch", **busy), EngineStatus(url=URL + "1", **DEAD))
    requested = (RequestedEngine(name="engine-0", type="torch"), RequestedEngine(name="engine-1", type="vllm"))
    fleet = FleetStatus(engines=listed, requested=requested)
    heading, first, second, third = (" ".join(line.split()) for line in table(fleet))
    assert heading == "name type lifecycle version running waiting tokens/s url"
    assert first == f"engine-0 torch healthy 7 3 0 10 {URL}"
    assert second == f"- - dead - 0 0 0 {URL}1 no answer"
    assert third == "engine-1 vllm requested - - - -"


def test_engine_swap_waits_until_the_new_engine_serves_and_the_old_one_leaves(controller, tmp_path):
    controller.standings = {"engine-0": ["healthy", "draining", "left"], "engine-1": ["joining", "healthy"]}
    joined, gone = run(tmp_path, "swap", "engine-0", "--type", "vllm", "--timeout", "9").splitlines()
    assert joined.startswith("engine-1") and " healthy " in joined
    assert gone.startswith("engine-0") and " left " in gone
    order = {"type": "vllm", "count": 1, "replaces": "engine-0", "grace_s": 9.0}
    assert controller.requests == [("POST", "/engines/request", order)]


def test_engine_swap_without_a_launcher_prints_the_command_to_start_the_engine_and_waits(controller, tmp_path):
    controller.has_launcher = False
    controller.standings = {"engine-0": ["healthy"] * 3 + ["left"], "engine-1": ["not there", "healthy"]}
    lines = run(tmp_path, "swap", "engine-0", "--type", "jax").splitlines()
    assert "start engine-1 yourself" in lines[0]
    expected = f"pipelinerl engine --name engine-1 --type jax --port 0 --controller-url {address_of(tmp_path).url}"
    assert lines[1].strip() == f"{expected} --recipe {tmp_path}/recipe.toml --run-dir {tmp_path}"
    assert lines[2].startswith("waiting for engine-1") and f"pipelinerl engines remove {tmp_path} engine-1" in lines[2]
    assert " healthy " in lines[3] and " left " in lines[4]
    assert lines[5] == f"no launcher is running: the process at {URL}0 keeps running until you stop it (Ctrl-C)"


def test_engine_commands_without_a_launcher_say_that_the_user_starts_and_stops_processes(controller, tmp_path):
    controller.has_launcher = False
    controller.standings = {"engine-0": ["expelled"]}
    assert "start engine-1 yourself" in run(tmp_path, "add", "--type", "torch", "--no-wait")
    assert "start engine-1 yourself" in run(tmp_path, "swap", "engine-0", "--type", "torch", "--no-wait")
    assert "keeps running until you stop it" in run(tmp_path, "remove", "engine-0")
    assert "keeps running until you stop it" in run(tmp_path, "drain", "engine-0")
    elsewhere = run(address_of(tmp_path).url, "add", "--type", "torch", "--no-wait")
    assert "PIPELINERL_TOKEN=TOKEN pipelinerl engine --name engine-1" in elsewhere


def test_each_engine_command_sends_its_request_to_the_controller(controller, tmp_path):
    controller.standings = {"engine-0": ["expelled"]}
    assert run(tmp_path, "add", "--type", "torch", "--no-wait") == "requested engine-1\n"
    assert run(tmp_path, "add", URL + "/", "--no-wait") == f"requested {URL}\n"
    assert run(tmp_path, "drain", "engine-0").startswith("engine-0")
    assert run(tmp_path, "remove", URL) == f"{URL} was removed\n"
    assert len(run(tmp_path, "list").splitlines()) == 3
    assert controller.requests == [
        ("POST", "/engines/request", {"type": "torch", "count": 1, "replaces": "", "grace_s": 60.0}),
        ("POST", "/engines", {"url": URL + "/"}),
        ("POST", "/engines/drain", {"engine": "engine-0", "grace_s": 60.0}),
        ("DELETE", "/engines?engine=http%3A%2F%2F127.0.0.1%3A7001", None),
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["add"], "give either a running engine's URL or a --type"),
        (["add", URL, "--type", "torch"], "give either a running engine's URL or a --type"),
        (["add", "--type", "torhc"], r"--type must be one of torch, .*, got 'torhc'"),
        (["swap", "engine-0", "--type", "torhc"], r"--type must be one of torch, .*, got 'torhc'"),
    ],
)
def test_wrong_engine_or_type_is_rejected_before_any_request(controller, tmp_path, words, sentence):
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, *words)
    assert controller.requests == []


def test_engine_add_fails_with_the_reason_if_the_engine_cannot_start(controller, tmp_path):
    controller.to_stop = ("engine-1",)
    with pytest.raises(UserError, match=r"engine-1 did not join, and the run continues without it$"):
        run(tmp_path, "add", "--type", "vllm")
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "engine-1.log"
    log.write_text("much\npipelinerl: engine-1 takes 1 GPU, and too few are free\n")
    with pytest.raises(UserError, match=r"continues without it: engine-1 takes 1 GPU, and too few are free; see .*lo"):
        run(tmp_path, "add", "--type", "vllm")
    log.write_text("Traceback\nKeyError\n")
    with pytest.raises(UserError, match=r"continues without it; see .*logs/engine-1\.log"):
        run(tmp_path, "add", "--type", "vllm")


def test_timeout_error_names_the_engine_that_does_not_join_or_leave_and_its_state(controller, tmp_path):
    controller.standings = {"engine-0": ["joining"], "engine-1": ["expelled"]}
    (tmp_path / "engine-0.log").touch()
    with controller_of(tmp_path) as remote:
        with pytest.raises(DeadlineError, match=r"engine-0 did not serve within 0\.3 s; it is joining why not; see .*"):
            joined(remote, "engine-0", logs=tmp_path, within_s=0.3)
        with pytest.raises(UserError, match="engine-1 was expelled: why not"):
            joined(remote, "engine-1", logs=Path("logs"))
        with pytest.raises(DeadlineError, match=r"engine-7 did not leave within 0\.3 s; it has not joined the run$"):
            gone(remote, "engine-7", within_s=0.3)
        with pytest.raises(DeadlineError, match=r"it has not joined the run$"):
            joined(remote, "engine-7", logs=tmp_path / "logs", within_s=0.3)
        controller.has_launcher = False
        by_hand = ManualStart(str(tmp_path), remote.url, "torch")
        with pytest.raises(DeadlineError, match=r"it has not joined the run; the terminal in which you started it"):
            joined(remote, "engine-7", logs=tmp_path / "logs", within_s=0.3, start=by_hand)


def test_engine_list_says_how_clients_reach_the_engines(controller, tmp_path):
    controller.standings = {"engine-0": ["joining"], "engine-1": ["healthy"], "engine-2": ["pinned"]}
    save(load("tiny"), tmp_path / "recipe.toml")
    write_layout(tmp_path)
    assert run(tmp_path, "list").splitlines()[-1] == (
        f'OpenAI API at {URL}1/v1 and 1 more, model tiny_speller, key is "token" in {tmp_path}/tokens.json'
    )
    url = address_of(tmp_path).url
    assert run(url, "list").splitlines()[-1] == f"OpenAI API at {URL}1/v1 and 1 more, key in $PIPELINERL_TOKEN"


def test_client_program_printed_by_the_command_calls_a_serving_engine(controller, tmp_path, monkeypatch, capsys):
    controller.standings = {"engine-0": ["healthy"]}
    save(load("tiny", ['model.path="models/scripted"']), tmp_path / "recipe.toml")
    write_layout(tmp_path)
    (tmp_path / "tokens.json").write_text(json.dumps({"token": "secret"}))
    with in_thread(application(token="secret")) as url:
        for where in (str(tmp_path), address_of(tmp_path).url):
            program = run(where, "client").replace(f"{URL}0", url)
            monkeypatch.setenv("PIPELINERL_TOKEN", "secret")
            exec(compile(program, "client", "exec"), {})
            assert capsys.readouterr().out.strip()
    controller.standings = {"engine-0": ["joining"]}
    with pytest.raises(UserError, match="no engine that serves; pipelinerl engines list"):
        run(tmp_path, "client")
