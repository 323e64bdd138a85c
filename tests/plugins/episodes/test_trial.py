"""Tests of the trial episode that `pipelinerl check` plays with the python tool, in the real sandbox."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipelinerl.commands.findings.trials import tool_format
from pipelinerl.config.recipe import parse
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.episodes.trial import episode_tried
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.runs import SandboxMissing, Tier
from pipelinerl.types import Message, Problem
from tests.fakes.talking_sampler import tokenizer as without_tools
from tests.fakes.tool_model import TOOL_TEMPLATE, tool_chat, tool_tokenizer

RECIPE: dict[str, Any] = {
    "model": {"path": "m"},
    "domains": [{"name": "sums", "source": "addition", "episode": {"tools": ["python"], "max_turns": 3}}],
}
PROBLEM = Problem(problem_id="p", domain="sums", messages=(Message("user", "6 * 7?"),), ground_truth="42")


CODE = """
async def once(task, client):
    answer = await client.chat(task.messages)
    return float(answer.content == "42")

async def nothing(task, client):
    return 1.0

async def much(task, client):
    await client.chat([{"role": "user", "content": "x" * 5000}])
    return 1.0
"""


async def lines(tokenizer, **domain):
    config = parse({**RECIPE, "domains": [RECIPE["domains"][0] | domain]})
    return await episode_tried(config, config.domains[0], PROBLEM, tokenizer)


def with_tools():
    try:
        probe.opened(Tier.DEFAULT).close()
    except SandboxMissing as error:
        pytest.skip(f"left out: {error}")
    return tool_chat()


async def test_check_shows_a_trial_tool_call_its_result_and_the_verdict():
    (_, call), (_, result), (_, verdict), (kind, warning) = await lines(with_tools(), max_tokens=256)
    assert kind == "warning" and "an episode of 3 such turns with answers of 256 tokens may reach" in warning
    assert '▸ \'<tool_call>\\n{"name": "python"' in call
    assert "<tool_response>\\n42\\n</tool_response>" in result and "new segment" not in result
    assert verdict.startswith("domains.sums: correct, reward 1;")


async def test_user_environment_can_be_combined_with_the_python_tool_of_the_recipe(tmp_path):
    (tmp_path / "agent.py").write_text(CODE)
    played = await lines(with_tools(), environment=f"{tmp_path}/agent.py:once")
    assert "<tool_response>\\n42\\n</tool_response>" in played[1][1]
    assert played[2][1].startswith("domains.sums: correct, reward 1;")


async def test_environment_that_never_calls_the_model_is_rejected(tmp_path):
    (tmp_path / "agent.py").write_text(CODE)
    with pytest.raises(RecipeError, match="never asked the model"):
        await lines(without_tools(), environment=f"{tmp_path}/agent.py:nothing", episode={})


async def test_check_warns_of_a_request_that_a_run_refuses_because_it_fills_the_context(tmp_path):
    (tmp_path / "agent.py").write_text(CODE)
    kind, warning = (await lines(without_tools(), environment=f"{tmp_path}/agent.py:much", episode={}))[-1]
    assert kind == "warning" and re.search(r"has 5,\d+ tokens, and a run refuses it", warning)


async def test_chat_template_without_tool_calls_is_rejected():
    with pytest.raises(RecipeError, match=r"domains\.sums\.episode\.tools: the chat template .* does not use tools"):
        await lines(without_tools())


async def test_chat_template_whose_tool_calls_cannot_be_parsed_back_is_rejected():
    template = TOOL_TEMPLATE.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>")
    tokenizer = ChatTokenizer(tool_tokenizer(template=template), {1})
    with pytest.raises(RecipeError, match=r"episode\.tools: the calls .* cannot be parsed back.*Hermes, Qwen3-Coder"):
        await lines(tokenizer)
    assert tool_format(tokenizer).startswith("writes no tool calls that can be parsed back")
    assert tool_format(tool_chat()) == "writes tool calls in the format of Hermes, which is parsed"
