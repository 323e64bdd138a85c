"""Malformed requests to the gateway: none makes it fail with status 500, or hang, in any of its APIs."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any, Final

import httpx
import pytest

from tests.fakes.hostile_replies import NODES, mutated
from tests.plugins.episodes.test_agent_apis import SCHEMA, ScriptedModel, opened

#: A time that the gateway needs for no request to a scripted model.
SOON_S: Final = 30.0

_FUNCTION: Final = {"name": "look", "description": "Look.", "parameters": SCHEMA}
#: Valid bodies, which are mutated.
VALID: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": "m", "max_tokens": 9, "stream": False, "stream_options": {"include_usage": True}, "stop": ["z"],
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "none", "temperature": 1.0,
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "a"}, {"role": "user", "content": "v", "name": None},
        ],
        "chat_template_kwargs": {"a": True},
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "stream": False, "system": [{"type": "text", "text": "s"}],
        "stop_sequences": ["z"], "thinking": {"type": "adaptive"}, "tool_choice": {"type": "none"},
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}], "output_config": {"effort": "low"},
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "i", "name": "look", "input": {"at": "b"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]},
        ],
    },
    "/v1/responses": {
        "model": "m", "max_output_tokens": 9, "stream": False, "instructions": "s", "reasoning": {"effort": "low"},
        "previous_response_id": None, "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "none",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "include": [], "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "i", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "i", "output": "r"},
        ],
    },
    "/reward": {"reward": 0.5},
}  # fmt: skip
VALID["/v1/messages/count_tokens"] = VALID["/v1/messages"]
_NODES: Final = (*NODES, '"</think>"', '"user"', '"assistant"', '"auto"', '{"type": "text"}')


def case(number):
    """Return the path and the body of case `number`: one of ten is valid."""
    draw = Random(number)
    path = draw.choice(list(VALID))
    valid = VALID[path] | ({"stream": draw.random() < 0.5} if "v1" in path else {})
    return path, json.dumps(valid).encode() if draw.random() < 0.1 else mutated(valid, draw, nodes=_NODES)


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_no_mutated_body_makes_the_gateway_fail_or_hang(cases):
    """The answers of the cases differ in their outcomes, so that the mutations reach beyond the first check."""
    outcomes = set()
    async with httpx.AsyncClient(trust_env=False, timeout=SOON_S) as http:
        for start in range(0, cases, 200):
            async with opened(ScriptedModel(itertools.repeat("a")), max_turns=1000) as episode:
                base = episode.base_url().removesuffix("/v1")
                for number in range(start, start + 200):
                    path, body = case(number)
                    response = await http.post(base + path, content=body, headers={"content-type": "application/json"})
                    assert response.status_code in (200, 400), (number, response.status_code, body)
                    if response.status_code != 200:
                        assert response.json()["error"]["message"], (number, body)
                    outcomes.add((path, response.status_code))
    assert {(path, status) for path in VALID for status in (200, 400)} <= outcomes


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "input": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "u"}], "input": "u", "tools": NaN}',
        b'{"messages": [{"role": "user", "content": "u"}], "input": "u", "tools": 1e999}',
        b'{"messages": "\xff"}',
        b"[]",
        b"1" * 10_000,
        b"{",
    ],
    ids=["deep", "deep field", "surrogate", "nan", "overflow", "utf-8", "list", "digits", "cut"],
)
@pytest.mark.parametrize("path", [path for path in VALID if "v1" in path])
async def test_body_that_is_no_json_object_is_rejected_with_status_400(body, path):
    async with opened(ScriptedModel([])) as episode, httpx.AsyncClient(trust_env=False, timeout=SOON_S) as http:
        url, headers = episode.base_url().removesuffix("/v1") + path, {"content-type": "application/json"}
        response = await http.post(url, content=body, headers=headers)
        assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]
