"""Engines serve the requests of public clients, tested with recorded request bodies and with OpenAI's own client.

`clients/*.json` holds the request bodies that each client, at the version given there, sent to a recording server.
"""

import json
from pathlib import Path

import httpx
import pytest

from inference_contract.conformance.session import chunks
from inference_contract.schemas import ChatCompletion
from pipelinerl.engines.http.server import create_app
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from tests.fakes.engine_options import bigram_engine
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

RECORDED = [
    pytest.param(request["body"], id=f"{recorded['client']} {recorded['version']}: {request['call']}")
    for path in sorted((Path(__file__).parent / "clients").glob("*.json"))
    for recorded in [json.loads(path.read_text())]
    for request in recorded["requests"]
]
CHAT = [{"role": "user", "content": "1 + 2"}]


@pytest.fixture(scope="module")
def url():
    """Serve an engine with a real tokenizer and a small model over HTTP."""
    raw = char_tokenizer()
    tokenizer = ChatTokenizer(raw, {raw.eos_token_id})
    with in_thread(create_app(bigram_engine(tokenizer, rows=4, context_length=96), token=None)) as served:
        yield served


@pytest.fixture
def public_client(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def post(url, body):
    return httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE_S)


@pytest.mark.parametrize("body", RECORDED)
def test_recorded_requests_of_public_clients_are_served(url, body):
    answer = post(url, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        assert ChatCompletion.model_validate_json(answer.content).choices[0].message.content
        return
    received = list(chunks(answer, answer.text.splitlines()))
    assert "".join(part.delta.content or "" for chunk in received for part in chunk.choices)
    wants_usage = (body.get("stream_options") or {}).get("include_usage", False)
    has_usage = [chunk.usage is not None for chunk in received]
    assert has_usage == [False] * (len(received) - wants_usage) + [True] * wants_usage


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


def test_request_may_set_top_k_to_minus_one_and_give_its_content_as_text_parts(url):
    plain = post(url, {"messages": CHAT, "seed": 1, "max_tokens": 8, "return_token_ids": True}).json()
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}]
    again = post(url, {"messages": parts, "seed": 1, "max_tokens": 8, "return_token_ids": True, "top_k": -1}).json()
    assert again["choices"] == plain["choices"] and again["prompt_token_ids"] == plain["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"store": True}, "store"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}, "stream_options"),
        ({"messages": [{"role": "user", "content": "a", "name": "ann"}]}, "messages.0.name"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"frobnicate": None}, "frobnicate"),
    ],
)
def test_request_fields_that_the_engine_would_ignore_are_rejected_by_name(url, fields, param):
    answer = post(url, {"messages": CHAT, "max_tokens": 2} | fields)
    assert answer.status_code == 400
    assert str(answer.json()["error"]["param"]).startswith(param)
    assert "image_url" not in answer.text
