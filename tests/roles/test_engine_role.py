"""An engine's process: it ends when the engine stops, so that the supervisor can start another."""

import asyncio
import re
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI, Request
from transformers import AutoModelForCausalLM

from pipelinerl.config.recipe import load
from pipelinerl.config.sections import MODELS
from pipelinerl.controller import routes
from pipelinerl.errors import EngineUnreachable, UserError
from pipelinerl.roles import engine_role
from pipelinerl.roles.process import Identity
from pipelinerl.system.http_service import offered_url
from pipelinerl.system.machine import free_ports
from tests.fakes.bigram_recipe import bigram_recipe
from tests.fakes.served import in_thread
from tests.fakes.sglang_server import SglangServer, create_app
from tests.patience import PATIENCE_S


async def _until_ready(http, role):
    async with asyncio.timeout(PATIENCE_S):
        while not role.done():
            try:
                (await http.get("/health")).raise_for_status()
                return
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
    await role


# The engine stops by an error in its own thread; pytest would warn about that unhandled error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_engine_process_exits_when_its_engine_stops_because_of_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    server = SglangServer(AutoModelForCausalLM.from_pretrained(MODELS / "tiny_speller"), context_length=64)
    with in_thread(create_app(server)) as stock:
        config = load("tiny", ["engine.type=sglang_server", f'engine.servers=["{stock}"]'])
        (port,) = free_ports(1)
        identity = Identity(run_dir=tmp_path, config=config, name="engine-0", port=port)
        role = asyncio.create_task(engine_role.run(identity))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as http:
            await _until_ready(http, role)
            theirs = {"new_version": "theirs", "abort_all_requests": False}
            httpx.post(f"{stock}/update_weight_version", json=theirs).raise_for_status()
            answer = await http.post("/v1/chat/completions", json={"prompt_token_ids": [7, 9], "max_tokens": 4})
            assert answer.status_code == 503
        with pytest.raises(EngineUnreachable, match="stopped by itself"):
            await asyncio.wait_for(role, PATIENCE_S)


async def test_engine_of_a_type_in_a_file_registers_itself(tmp_path):
    (tmp_path / "own.py").write_text("from pipelinerl.plugins.bigram.engine import from_options\n")
    config = load(str(bigram_recipe(tmp_path / "bigram")), [f"engine.type={tmp_path}/own.py:from_options"])
    offers, application = [], FastAPI()

    @application.post(routes.ENGINES)
    async def register(request: Request) -> dict[str, str]:
        offers.append((await request.json())["type"])
        return {"state": "joining"}

    with in_thread(application) as url:
        identity = Identity(run_dir=tmp_path, config=config, name="engine-0", controller_url=url)
        role = asyncio.create_task(engine_role.run(identity))
        async with asyncio.timeout(PATIENCE_S):
            while not offers and not role.done():
                await asyncio.sleep(0.05)
        assert offers[:1] == [config.engine.type] and not role.done()
        role.cancel()
        await asyncio.wait([role])


async def test_engine_process_ends_if_it_cannot_go_on_registering(tmp_path, monkeypatch):
    async def fail(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(engine_role, "_offer", fail)
    config = load(str(bigram_recipe(tmp_path / "bigram")))
    identity = Identity(run_dir=tmp_path, config=config, name="engine-0", controller_url="http://127.0.0.1:9")
    with pytest.raises(KeyError, match="a bug"):
        await asyncio.wait_for(engine_role.run(identity), PATIENCE_S)


def test_engine_registers_an_address_that_other_machines_can_reach(outward):
    """An engine that listens on all interfaces registers its address on the route to the controller, never 0.0.0.0."""
    here, away = "http://127.0.0.1:8000", "http://198.51.100.7:8000"
    assert offered_url(("127.0.0.1", 8001), here) == "http://127.0.0.1:8001"
    assert offered_url(("0.0.0.0", 8001), here) == "http://127.0.0.1:8001"
    assert offered_url(("fd00::2", 8001, 0, 0), here) == "http://[fd00::2]:8001"
    assert offered_url(("0.0.0.0", 8001), away) == f"http://{outward}:8001"


@pytest.mark.parametrize(
    ("bound", "controller", "error"),
    [
        ("127.0.0.1", "http://nowhere.invalid:8000", "no route to the controller at http://nowhere.invalid:8000"),
        ("0.0.0.0", "http://nowhere.invalid:8000", "no route to the controller at http://nowhere.invalid:8000"),
        ("0.0.0.0", "http://10.0.0.1:port", "must be like http://host:8000, got http://10.0.0.1:port"),
        ("127.0.0.1", "http://{outward}:8000", "at 127.0.0.1 only, where other machines cannot reach it"),
        ("127.0.1.1", "http://{outward}:8000", "at 127.0.1.1 only, where other machines cannot reach it"),
    ],
)
def test_engine_that_its_controller_cannot_reach_is_rejected(bound, controller, error, outward):
    with pytest.raises(UserError, match=re.escape(error)):
        offered_url((bound, 8001), controller.format(outward=outward))


_BUILD = """
import sys
from pipelinerl.config.recipe import load
from pipelinerl.roles.engine_role import engine_outside_run
from pipelinerl.roles.process import Identity

engine_outside_run(load(sys.argv[1], sys.argv[2:]))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(("transport", "has_torch"), [("broadcast", True), ("pull", False)])
def test_numpy_engine_imports_torch_at_its_start_if_it_will_receive_weights_through_torch(
    tmp_path, transport, has_torch
):
    """If it imported torch when it first joins, all members of the weight group would wait a second for the import."""
    words = [str(bigram_recipe(tmp_path / "bigram")), f"weights.transport={transport}"]
    built = subprocess.run([sys.executable, "-c", _BUILD, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert built.stdout == f"{has_torch}\n", built.stderr
