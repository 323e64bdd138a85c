"""`pipelinerl check` tries a domain's verifier, and a judge, which may cost money, only once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.commands.findings.verifier_trial import called_by_place, tried
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.roles.wiring import training_problems
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.scripted_judge import scripted_judge
from tests.fakes.served import in_thread


async def trial(**domain: Any) -> str:
    config = parse(to_table(load("tiny")) | {"domains": [{"name": "d", "source": "instructions", **domain}]})
    return await tried(config.domains[0], training_problems(config))


async def test_judge_votes_once_and_its_reply_is_shown() -> None:
    fake = OpenAIFake(scripted_judge())
    with in_thread(fake.app) as url:
        said = await trial(verifier="judge", judge={"url": url, "votes": 3, "temperature": 1.0})
    assert len(fake.bodies) == 1
    assert said.startswith("of the reference answer, by one vote, partial, reward 0.111111 (judge 0.111111) in")
    assert said.endswith("the judge said 2: so it seems")


async def test_judge_that_cannot_judge_is_refused() -> None:
    fake = OpenAIFake(lambda body: "I like it")
    sentence = "domains.d.judge cannot judge: the judge said no score: 'I like it'"
    with in_thread(fake.app) as url, pytest.raises(RecipeError, match=re.escape(sentence)):
        await trial(verifier="judge", judge={"url": url})


async def test_instructions_need_no_reference_answer() -> None:
    said = await trial(verifier="instruction_following")
    assert said.startswith("of the reference answer correct, reward 1")
    assert "of an empty answer wrong, reward 0" in said


def test_unusual_names_of_positional_arguments_are_a_warning(tmp_path: Path) -> None:
    """Positional arguments are problem and answer, so `label` is not the truth."""
    (tmp_path / "r.py").write_text(
        "def by_place(response, label): return 1.0\n"
        "def as_shown(problem, completion_text): return 1.0\n"
        "def by_name(completion, answer): return 1.0\n"
    )

    def told(name: str) -> list[str]:
        domains = [{"name": "d", "source": "addition", "verifier": f"{tmp_path}/r.py:{name}"}]
        return list(called_by_place(parse(to_table(load("tiny")) | {"domains": domains}).domains[0]))

    (sentence,) = told("by_place")
    assert "verifier: response receives the problem and label the text of the answer, by position" in sentence
    assert told("as_shown") == told("by_name") == []
