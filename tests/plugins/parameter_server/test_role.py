"""The parameter server's process, started as the launcher starts it: health, token, snapshots of weights, and exit."""

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from pipelinerl.config.recipe import load
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.parameter_server import server as parameter_server_role
from pipelinerl.plugins.parameter_server.publisher import PullPublisher
from pipelinerl.plugins.parameter_server.upload import Uploader
from pipelinerl.roles.process import Identity
from pipelinerl.roles.trainer_role import publisher_of
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.system.machine import free_ports
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.grace import Grace
from tests.fakes.live_run import CLI
from tests.fakes.parameter_server import TOKEN, publication
from tests.patience import PATIENCE_S
from tests.plugins.parameter_server.test_snapshot_store import save


def test_parameter_server_process_serves_weights_and_saves_them_when_a_signal_ends_it(tmp_path):
    (port,) = free_ports(1)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"token": TOKEN}))
    words = [*CLI, "parameter-server", "--run-dir", str(tmp_path), "--token-file", str(tokens), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(url + "/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, "the server has not started"
                time.sleep(0.05)
        assert httpx.get(url + "/versions", trust_env=False).status_code == 401
        with closing(Uploader([url], token=TOKEN)) as placement:
            placement.upload(publication(1), {}, deadline=deadline)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert (tmp_path / "weights" / "parameter-server-0" / "1.1" / "manifest.json").is_file(), "saved before it ends"
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_weight_snapshots_of_other_runs_are_not_served(tmp_path):
    """The directory for snapshots may hold versions of another run, or of an earlier run with the same name."""

    def store(run, directory):
        config = load("tiny", [f"run.name={run}", f"parameter_server.copies={tmp_path}/copies"])
        identity = Identity(
            config=config,
            run_dir=tmp_path / directory,
            name="parameter-server-0",
            redis_url="",
            controller_url="",
            token=TOKEN,
        )
        return parameter_server_role.store_of(identity)

    first = store("a", "runs/a")
    save(first, (1, 9))
    assert list(store("b", "runs/b").newest()) == []
    assert [snapshot.key for snapshot in store("a", "runs/a").newest()] == [(1, 9)], "another life of the server"
    assert list(store("a", "elsewhere/a").newest()) == [], "begun afresh by the same name"


async def test_trainer_publishes_weights_by_the_transport_in_the_recipe():
    def identity(*changes):
        return Identity(
            config=load("tiny", changes),
            run_dir=Path("runs"),
            name="trainer",
            redis_url="",
            controller_url="",
            token=TOKEN,
        )

    async with EngineClient() as client:
        assert isinstance(publisher_of(identity(), client, MemoryStream(), Grace()), BroadcastPublisher)
        pulled = 'parameter_server.urls=["http://127.0.0.1:1"]'
        assert isinstance(
            publisher_of(identity("weights.transport=pull", pulled), client, MemoryStream(), Grace()), PullPublisher
        )
        with pytest.raises(RecipeError, match="no parameter server is named"):
            publisher_of(identity("weights.transport=pull"), client, MemoryStream(), Grace())
