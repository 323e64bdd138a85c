"""A live torch engine serves public clients: recorded requests, and those of OpenAI's own client.

`recorded_requests.json` holds request bodies that `openai`, `litellm`, `openai-agents` and `vllm` sent to a recording
server, with and without tools, and for each body the field that the torch engine rejects, if any.
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
ROUTE: Final = "/v1/chat/completions"
CHAT: Final = [{"role": "user", "content": "1 + 2"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Yield a client of a torch engine whose model is named `m`, after the last part of its directory's path."""
    path = tmp_path_factory.mktemp("models") / "m"
    save_tool_model(path, context_length=CONTEXT)
    options = engine_options(model_path=path, model_id=str(path), context_length=CONTEXT, device=Device.CPU, threads=1)
    app = create_app(from_options(options), token=None)
    with in_thread(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def public_client(client):
    import openai

    with openai.OpenAI(
        base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


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
        client.post(ROUTE, json=body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for body in (bare, with_tools, with_tools | {"tool_choice": "none"})
    ]
    assert counts[1] > counts[0] + 20 and counts[2] == counts[0]


def test_openai_client_gets_the_same_answer_streamed_and_in_one_piece(public_client):
    completions = public_client.chat.completions
    text = completions.create(model="m", messages=CHAT, seed=3, max_completion_tokens=20).choices[0].message.content
    assert text is not None and len(text) > 6
    request = {"model": "m", "messages": CHAT, "seed": 3, "stop": text[4:6]}
    whole = completions.create(**request)
    assert whole.choices[0].message.content == text.split(text[4:6])[0]
    streamed = list(completions.create(**request, stream=True, stream_options={"include_usage": True}))
    received = "".join(part.delta.content or "" for chunk in streamed for part in chunk.choices)
    assert received == whole.choices[0].message.content
    assert whole.usage is not None and streamed[-1].usage == whole.usage
    assert [chunk.usage for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    with completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == received
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_openai_client_can_send_back_an_earlier_answer_as_an_object_or_a_dict(public_client):
    completions = public_client.chat.completions
    first = completions.create(model="m", messages=CHAT, max_tokens=8, seed=1).choices[0].message
    assert first.content is not None
    forms = [first, first.model_dump(), {"role": "assistant", "content": first.content}]
    answers = [
        completions.create(model="m", messages=[*CHAT, form, *CHAT], max_tokens=8, seed=2).choices[0].message.content
        for form in forms
    ]
    assert answers[0] == answers[1] == answers[2]


def test_request_may_set_top_k_to_minus_one_and_give_its_content_as_text_parts(client):
    plain = {"messages": CHAT, "seed": 1, "max_tokens": 8, "return_token_ids": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}]
    one, other = (client.post(ROUTE, json=plain | each).json() for each in ({}, {"messages": parts, "top_k": -1}))
    assert one["choices"] == other["choices"] and one["prompt_token_ids"] == other["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"store": True}, "store"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}, "stream_options"),
        ({"messages": [{"role": "user", "content": "a", "name": "ann"}]}, "messages.0.name"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"frobnicate": None}, "frobnicate"),
    ],
)
def test_request_fields_that_the_engine_would_ignore_are_rejected_by_name(client, fields, param):
    answer = client.post(ROUTE, json={"messages": CHAT, "max_tokens": 2} | fields)
    assert answer.status_code == 400
    assert str(answer.json()["error"]["param"]).startswith(param)
    assert "image_url" not in answer.text
