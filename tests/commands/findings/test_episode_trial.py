"""The trial episode of `pipelinerl check` with the python tool, in the real sandbox."""

from __future__ import annotations

import pytest

from pipelinerl.commands.findings.episode_trial import episode_tried
from pipelinerl.config.recipe import parse
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Message, Problem
from pipelinerl.verifiers.oubliette import probe
from pipelinerl.verifiers.oubliette.runs import SandboxMissing, Tier
from tests.fakes.talking_sampler import tokenizer as without_tools
from tests.fakes.tool_model import tool_tokenizer

RECIPE = {
    "model": {"path": "m"},
    "domains": [{"name": "sums", "source": "addition", "episode": {"tools": ["python"], "max_turns": 3}}],
}
PROBLEM = Problem(problem_id="p", domain="sums", messages=(Message("user", "6 * 7?"),), ground_truth="42")


async def lines(tokenizer: ChatTokenizer) -> list[str]:
    config = parse(RECIPE)
    return await episode_tried(config, config.domains[0], PROBLEM, tokenizer)


async def test_check_shows_a_call_its_result_and_the_verdict() -> None:
    try:
        probe.opened(Tier.DEFAULT).close()
    except SandboxMissing as error:
        pytest.skip(f"left out: {error}")
    made = tool_tokenizer()
    call, result, verdict = await lines(ChatTokenizer(made, {made.convert_tokens_to_ids("<|end|>")}))
    assert '▸ \'<tool_call>\\n{"name": "python"' in call
    assert "<tool_response>\\n42\\n</tool_response>" in result and "new segment" not in result
    assert verdict.startswith("correct, reward 1;")


async def test_chat_template_without_calls_is_rejected() -> None:
    with pytest.raises(RecipeError, match="chat template must write calls"):
        await lines(without_tools())
