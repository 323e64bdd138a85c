"""A live torch engine answers forty recorded requests of three public clients, or names the field that it rejects.

`recorded_requests.json` holds request bodies that `openai`, `litellm` and `openai-agents` sent to a recording server,
with and without tools, and for each body the field that the torch engine rejects, if any.
"""

import json
from pathlib import Path
from typing import Final

import httpx
import pytest

from inference_contract.completions import TextCompletion
from inference_contract.conformance.session import chunks
from inference_contract.schemas import ChatCompletion
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.torch.engine import from_options
from tests.fakes.engine_options import engine_options
from tests.fakes.served import in_thread
from tests.fakes.tool_model import save_tool_model
from tests.patience import PATIENCE_S
from trainer_contract.types import Device

RECORDED: Final = json.loads((Path(__file__).parent / "recorded_requests.json").read_text())
CONTEXT: Final = 1024


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Yield a client of a torch engine whose model is named `m`, after the last part of its directory's path."""
    path = tmp_path_factory.mktemp("models") / "m"
    save_tool_model(path, context_length=CONTEXT)
    options = engine_options(model_path=path, model_id=str(path), context_length=CONTEXT, device=Device.CPU, threads=1)
    app = create_app(from_options(options), token=None)
    with in_thread(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['client']}: {each['call']}")
def test_recorded_request_is_answered_or_its_unsupported_field_is_rejected_by_name(client, recorded):
    body = {"max_tokens": 6} | recorded["body"]
    answer = client.post(recorded["route"], json=body)
    if recorded["refused"] is not None:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == recorded["refused"]
        assert recorded["refused"] in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        if recorded["route"].endswith("chat/completions"):
            assert any(
                part.finish_reason for chunk in chunks(answer, answer.text.splitlines()) for part in chunk.choices
            )
    elif recorded["route"].endswith("chat/completions"):
        assert ChatCompletion.model_validate_json(answer.content).choices[0].finish_reason
    else:
        prompts = body["prompt"] if isinstance(body["prompt"][0], str) and isinstance(body["prompt"], list) else [0]
        choices = TextCompletion.model_validate_json(answer.content).choices
        assert [choice.index for choice in choices] == list(range(len(prompts) * body.get("n", 1)))


def test_tool_descriptions_are_added_to_the_prompt_unless_tool_choice_is_none(client):
    with_tools = next(each["body"] for each in RECORDED if each["call"] == "create(tools=…)")
    bare = {name: value for name, value in with_tools.items() if name != "tools"}
    counts = [
        client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for body in (bare, with_tools, with_tools | {"tool_choice": "none"})
    ]
    assert counts[1] > counts[0] + 20 and counts[2] == counts[0]
