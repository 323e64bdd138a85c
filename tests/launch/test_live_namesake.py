"""A run does not start while another run with the same name is live, unless the user passes --new."""

import json

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from launch.run_directory import create, refuse_namesake
from pipelinerl.commands.remote import started_by_hand
from pipelinerl.config.recipe import parse
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RunStatus
from tests.fakes.checkpoints import model_directory
from tests.fakes.served import in_thread


@pytest.fixture
def config(tmp_path):
    run = {"name": "tiny", "directory": str(tmp_path / "runs")}
    model = {"path": str(model_directory(tmp_path / "model"))}
    return parse({"model": model, "domains": [{"name": "d", "source": "s"}], "run": run})


@pytest.fixture
def controller_url():
    app = FastAPI(openapi_url=None)
    status = msgspec.json.encode(RunStatus(run="tiny"))
    app.get("/status")(lambda: Response(status, media_type="application/json"))
    with in_thread(app) as url:
        yield url


def test_new_run_may_have_the_name_of_finished_runs(config):
    refuse_namesake(config, by_hand=started_by_hand)
    create(config), create(config)
    refuse_namesake(config, by_hand=started_by_hand)


def test_live_run_with_the_same_name_is_detected_even_if_its_directory_name_has_a_number_appended(config):
    create(config)
    second = create(config)
    with (
        second.locked(),
        pytest.raises(UserError, match=r"a run of this name is live in .*tiny-2 \(process \d+\)") as e,
    ):
        refuse_namesake(config, by_hand=started_by_hand)
    assert f"--resume {second.path}" in str(e.value) and "--new" in str(e.value)
    refuse_namesake(config, by_hand=started_by_hand)


def test_live_run_that_no_launcher_started_is_detected_by_its_controllers_address_file(config, controller_url):
    directory = create(config)
    address = directory.path / "controller.json"
    address.write_text(json.dumps({"url": controller_url, "token": None}))
    with pytest.raises(UserError, match=f"services started manually, controller at {controller_url}"):
        refuse_namesake(config, by_hand=started_by_hand)
    address.write_text(json.dumps({"url": "http://127.0.0.1:9", "token": None}))  # as left by a killed controller
    refuse_namesake(config, by_hand=started_by_hand)
