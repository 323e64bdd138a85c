"""The table of sampling settings in docs/understand/mismatch.md says what each setting does to ratios in training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from inference_contract.errors import InvalidRequest
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.config.recipe import load
from pipelinerl.config.sections import SamplingSection
from pipelinerl.errors import UserError
from pipelinerl.plugins.episodes.episode import _SAMPLING, Episode
from pipelinerl.roles.engine_rules import check_truncation
from tests.fakes.talking_sampler import order

PAGE: Final = Path(__file__).parents[2] / "docs" / "understand" / "mismatch.md"
#: The settings of all rows of the table: origin, name, and the outcome in each column.
ROWS: Final = [
    (origin, setting, outcomes.split(" | "))
    for origin, settings, outcomes in re.findall(
        r"^\| (recipe|agent) \| ([`\w, ]+) \| (\w+ \| \w+ \| \w+) \|$", PAGE.read_text(), re.MULTILINE
    )
    for setting in re.findall(r"\w+", settings)
]
#: The engine types of the table's columns.
COLUMNS: Final = (("torch", "jax"), ("sglang_server",), ("vllm", "vllm_server"))
RECIPE: Final = {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": '["x"]', "max_tokens": 5}
AGENT: Final = {
    "temperature": 0.1, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "frequency_penalty": 1.0, "presence_penalty": 1.0,
    "repetition_penalty": 1.2, "logit_bias": {"3": 5.0}, "ignore_eos": True, "n": 2, "min_tokens": 4,
    "response_format": {"type": "json_object"}, "bad_words": ["a"], "allowed_token_ids": [1], "use_beam_search": True,
    "structured_outputs": {"regex": "a"}, "thinking": {}, "reasoning_effort": "high", "verbosity": "low",
}  # fmt: skip


def of_recipe(setting, engine):
    servers = ['engine.servers=["http://127.0.0.1:1"]'] if engine.endswith("_server") else []
    try:
        config = load("tiny", [f"sampling.{setting}={RECIPE[setting]}", f"engine.type={engine}", *servers])
        check_truncation(config)
    except UserError:
        return "refused"
    asked = replace(order(), sampling=config.sampling.of_an_order)
    return "corrected" if asked.needs_policy_logprobs else "exact"


def of_agent(setting):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    plain = Episode(order(), 0, EpisodeSection()).plan("main", body).request
    episode = Episode(order(), 0, EpisodeSection())
    try:
        planned = episode.plan("main", body | {setting: AGENT[setting]})
    except InvalidRequest as error:
        assert error.param == setting
        return "refused"
    assert planned.request == plain and episode.overridden == {setting: 1}
    return "ignored"


@pytest.mark.parametrize(("origin", "setting", "outcomes"), ROWS)
def test_documented_outcome_of_a_sampling_setting_is_the_real_one(origin, setting, outcomes):
    for outcome, engines in zip(outcomes, COLUMNS, strict=True):
        for engine in engines:
            assert outcome == (of_recipe(setting, engine) if origin == "recipe" else of_agent(setting)), engine


def test_every_sampling_setting_is_documented():
    documented = {origin: {row[1] for row in ROWS if row[0] == origin} for origin in ("recipe", "agent")}
    assert documented["recipe"] == RECIPE.keys() >= SamplingSection.model_fields.keys() - {"group_size"}
    assert documented["agent"] == AGENT.keys() >= _SAMPLING - {"seed", "priority"}
