"""Tests of the trials of verifiers in `pipelinerl check`."""

import json
import re

import pytest

from pipelinerl.commands.findings.trials import called_by_place, verifier_tried
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.roles.problems import training_problems
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.scripted_judge import scripted_judge
from tests.fakes.served import in_thread


async def trials(**domain):
    config = parse(to_table(load("tiny")) | {"domains": [{"name": "d", "source": "instructions"} | domain]})
    return await verifier_tried(config.domains[0], training_problems(config))


async def trial(**domain):
    ((kind, text),) = await trials(**domain)
    assert kind == "verifier"
    return text.removeprefix("domains.d: ")


async def test_check_warns_of_a_reward_function_that_returns_none_for_a_wrong_or_an_empty_answer(tmp_path):
    (tmp_path / "r.py").write_text(
        "def forgets(completion, answer):\n    if completion == answer:\n        return 1.0\n"
        "def half(completion, answer):\n    if not completion:\n        return 0.0\n    if completion == answer:\n"
        "        return 1.0\n"
        "def whole(completion, answer):\n    return float(completion == answer)\n"
    )

    async def warnings_for(name):
        found = await trials(source="addition", verifier=f"{tmp_path}/r.py:{name}")
        return [text for kind, text in found if kind == "warning"]

    empty, wrong = await warnings_for("forgets")
    assert empty.startswith("domains.d: an empty answer got no verdict (")
    assert "r.py:1: forgets judged nothing: it returned None)" in empty
    assert "must return 0.0 for a wrong answer, not None" in wrong
    assert wrong.startswith("domains.d: a wrong answer got no verdict")
    assert await warnings_for("half") == [wrong.replace("r.py:1: forgets", "r.py:4: half")]
    assert await warnings_for("whole") == []


async def test_check_asks_a_judge_for_one_vote_and_shows_its_reply():
    fake = OpenAIFake(scripted_judge())
    with in_thread(fake.app) as url:
        report = await trial(verifier="judge", judge={"url": url, "votes": 3, "temperature": 1.0})
    assert len(fake.bodies) == 1
    assert report.startswith("of the reference answer alone, because answers cost money, partial, reward 0.111111 (")
    assert report.endswith("score 2: so it seems")


async def test_check_rejects_a_judge_whose_reply_has_no_score():
    fake = OpenAIFake(lambda body: "I like it")
    sentence = "domains.d.verifier cannot judge: the judge's reply has no score: 'I like it'"
    with in_thread(fake.app) as url, pytest.raises(RecipeError, match=re.escape(sentence)):
        await trial(verifier="judge", judge={"url": url})


async def test_check_judges_a_math_reference_as_a_model_would_write_it_in_a_box(tmp_path):
    # Without the box, a text of this length is no answer.
    truth = "all positive integers that are divisible by six or by seven"
    rows = [{"prompt": f"{n}?", "answer": truth} for n in range(40)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = await trial(source="files", parameters={"path": f"{tmp_path}/p.jsonl"}, verifier="math_answer")
    assert report.startswith("of the reference answer correct, reward 1")
    assert "of an empty answer wrong, reward 0" in report


def test_check_warns_of_misleading_names_of_positional_verifier_arguments(tmp_path):
    """A verifier's positional arguments are problem and answer, so one named `label` would not get the ground truth."""
    (tmp_path / "r.py").write_text(
        "def by_place(response, label): return 1.0\n"
        "def as_shown(problem, completion_text): return 1.0\n"
        "def by_name(completion, answer): return 1.0\n"
    )

    def warnings_for(name):
        domains = [{"name": "d", "source": "addition", "verifier": f"{tmp_path}/r.py:{name}"}]
        return list(called_by_place(parse(to_table(load("tiny")) | {"domains": domains}).domains[0]))

    (sentence,) = warnings_for("by_place")
    assert "verifier: response receives the problem and label the text of the answer, by position" in sentence
    assert warnings_for("as_shown") == warnings_for("by_name") == []
