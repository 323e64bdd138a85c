"""An LLM judge over real HTTP: its scores, and verifier errors on outages, disagreement and an exhausted budget."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import dataclass

import pytest

from pipelinerl.engines.http.server import create_app
from pipelinerl.errors import EngineUnreachable, RecipeError
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.judge import JudgeSection
from pipelinerl.plugins.judge.verifier import Judge, ScoreFormat, Spending, Unreadable
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.registry import ENGINES, load
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import BudgetShare, SampledAnswer
from tests.fakes.engine_options import engine_options
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.problems import problem
from tests.fakes.scripted_judge import scripted_judge
from tests.fakes.served import in_thread
from tests.fakes.verifiers import opened
from tests.patience import PATIENCE_S

CAPITAL = problem("It is well known", question="The capital of France?")


def judging(url, *, budget=None, correct_at=0.5, **judge):
    section = {"url": f"{url}/v1", "timeout_s": PATIENCE_S, **judge}
    return opened("judge", name="d/e", budget=budget, correct_at=correct_at, judge=section)


async def verdicts(judge, *texts):
    return [each.verdict for each in await judge.judge(CAPITAL, [SampledAnswer(text) for text in texts])]


async def judged(fake, *texts, **settings):
    """Serve the fake judge, and let it judge the texts as one group; return the verdicts."""
    with in_thread(fake.app) as url:
        async with judging(url, **{"model": "small"} | settings) as judge:
            return await verdicts(judge, *texts)


def saying(*scores):
    """Return a fake judge model that replies with these scores in order, whatever the prompt."""
    left = list(scores)
    return lambda body: json.dumps({"reason": "r", "score": left.pop(0)})


async def test_judge_scores_answers_and_uses_the_api_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret-7")
    fake = OpenAIFake(scripted_judge())
    right, wrong = await judged(fake, "Paris.", "Rome.", key_variable="A_KEY", model=None)
    assert (right.outcome, right.reward, wrong.outcome) == (Outcome.CORRECT, 8 / 9, Outcome.PARTIAL)
    assert wrong.reward == 1 / 9 and wrong.reason == "score 2: so it seems"
    assert right.parts == (("judge", 8 / 9),)
    assert set(fake.tokens) == {"Bearer secret-7"} and fake.bodies[0]["model"] == "small"


async def test_judge_is_called_once_for_equal_answers_and_its_verdicts_are_cached():
    fake = OpenAIFake(scripted_judge())
    with in_thread(fake.app) as url:
        async with judging(url, model="small", remembered=2) as judge:
            assert len(set(await verdicts(judge, *["Paris."] * 8))) == 1
            await verdicts(judge, "Paris.")
            assert len(fake.bodies) == 1
            for text in ("a", "Paris.", "b", "Paris.", "a"):
                await verdicts(judge, text)
    assert len(fake.bodies) == 4, "the cache holds the two most recently judged answers"


async def test_several_scores_of_a_judge_are_averaged_and_their_agreement_is_reported():
    fake = OpenAIFake(saying(10, 7, 4))
    (verdict,) = await judged(fake, "x", votes=3, temperature=0.7)
    assert verdict.reward == pytest.approx(6 / 9) and verdict.outcome is Outcome.CORRECT
    assert dict(verdict.parts)["agreement"] == pytest.approx(1 / 3)
    assert len({body["seed"] for body in fake.bodies}) == 3 and {body["temperature"] for body in fake.bodies} == {0.7}
    (verdict,) = await judged(OpenAIFake(saying(10, "x", 10)), "x", votes=3, temperature=1.0)
    assert verdict.reward == 1.0, "two valid scores of three are enough"


@pytest.mark.parametrize(
    ("scores", "settings", "sentence"),
    [
        ((10, 1, 1), {"least_agreement": 0.5}, "the votes of the judge differ too much"),
        ((10, "x", "y"), {}, "only 1 of 3 votes succeeded: the judge's reply has no score"),
        ((11, 12, 5), {}, "only 1 of 3 votes succeeded: the judge gave the score 1[12], which is not from 1 to 10"),
    ],
)
async def test_answer_gets_a_verifier_error_if_the_judges_scores_disagree_or_are_missing(scores, settings, sentence):
    (verdict,) = await judged(OpenAIFake(saying(*scores)), "x", votes=3, temperature=1.0, **settings)
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert re.search(sentence, verdict.reason)


async def test_call_to_an_overloaded_judge_is_retried():
    fake = OpenAIFake(scripted_judge(), failures=(503, 429))
    (verdict,) = await judged(fake, "Paris.")
    assert verdict.outcome is Outcome.CORRECT and len(fake.bodies) == 3


@pytest.mark.parametrize(
    ("failures", "timeout_s", "words"),
    [((500,) * 10_000, 2.0, "had no answer within 2 s"), ((401,), PATIENCE_S, "HTTP 401: not now")],
)
async def test_answer_gets_a_verifier_error_if_the_judge_fails_and_a_verdict_once_the_judge_works_again(
    failures, timeout_s, words
):
    fake = OpenAIFake(scripted_judge(), failures=failures)
    with in_thread(fake.app) as url:
        async with judging(url, model="small", timeout_s=timeout_s) as judge:
            (verdict,) = await verdicts(judge, "Rome.")
            assert (verdict.outcome, verdict.reward) == (Outcome.VERIFIER_ERROR, 0.0) and words in verdict.reason
            fake.failures.clear()
            assert (await verdicts(judge, "Rome."))[0].outcome is Outcome.PARTIAL


async def test_answer_gets_a_verifier_error_if_the_judge_is_unreachable(tmp_path):
    for settings in ({}, {"model": "small"}):
        async with judging("http://127.0.0.1:9", timeout_s=0.5, **settings) as judge:
            (verdict,) = await verdicts(judge, "x")
            assert verdict.outcome is Outcome.VERIFIER_ERROR and "http://127.0.0.1:9" in verdict.reason


async def test_number_of_calls_to_the_judge_stays_within_its_budget_even_after_a_restart(tmp_path, caplog):
    fake, settings = OpenAIFake(scripted_judge()), {"budget": BudgetShare(tmp_path, sharers=2), "most_calls": 10}
    with caplog.at_level(logging.ERROR, logger="pipelinerl"):
        first = await judged(fake, "a", "b", "c", **settings)
        second = await judged(fake, "d", "e", "f", "g", **settings)  # as after a restart
    assert len(fake.bodies) == 5, "each of two processes may make half of ten calls"
    assert [each.outcome for each in first] == [Outcome.PARTIAL] * 3
    masked = [each for each in second if each.outcome is Outcome.VERIFIER_ERROR]
    assert len(masked) == 2 and all("has spent its share of 5 calls" in each.reason for each in masked)
    assert [record.message for record in caplog.records] == [masked[0].reason], "the error is logged once"


async def test_tokens_that_the_judges_server_reports_count_against_the_judges_budget(tmp_path):
    fake, budget = OpenAIFake(lambda body: '{"score": 5}'), BudgetShare(tmp_path, sharers=1)
    settings = {"budget": budget, "most_tokens": 30, "concurrency": 1}
    outcomes = [each.outcome for each in await judged(fake, "a", "b", "c", "d", **settings)]
    assert outcomes.count(Outcome.VERIFIER_ERROR) == 2, "15 tokens each: two calls"
    assert json.loads((tmp_path / "d%2Fe.json").read_text()) == {"calls": 2, "tokens": 30}


def test_damaged_file_with_a_judges_spent_budget_raises_an_error(tmp_path):
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(RecipeError, match=r"c.json holds the budget spent so far and is damaged"):
        Spending(where="d", most_calls=1, most_tokens=None, file=tmp_path / "c.json")


async def test_engine_of_this_project_can_serve_the_judge(tmp_path, monkeypatch):
    tokenizer = char_tokenizer()
    BigramModel.random(len(tokenizer), seed=1, context_length=4096).save(tmp_path)
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    options = engine_options(model_path=tmp_path, model_id="frozen", context_length=4096)
    monkeypatch.setenv("A_KEY", "secret")
    settings = {"pattern": r"\A[^0-9]*([0-9])", "low": 0, "high": 9, "temperature": 1.0, "max_tokens": 200}
    with in_thread(create_app(load("engine", ENGINES, "bigram")(options), token="secret")) as url:
        async with judging(url, key_variable="A_KEY", **settings) as judge:
            (verdict,) = await verdicts(judge, "Paris.<|im_end|>")
    assert verdict.outcome.is_judgement, verdict.reason
    assert verdict.reason.startswith("score ")


@dataclass
class Said:
    text: str = '{"score": 5}'
    num_tokens: int | None = None
    prompt_tokens: int | None = None


class CountingServer:
    """A fake server of the judge that counts concurrent calls, and answers only while `free` is set."""

    url = "http://judge"

    def __init__(self):
        self.now = self.most = self.calls = 0
        self.free = asyncio.Event()
        self.free.set()

    async def sample(self, messages, sampling, *, seed):
        self.now, self.calls = self.now + 1, self.calls + 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            await self.free.wait()
        finally:
            self.now -= 1
        return Said()

    async def close(self):
        pass


UNLIMITED = Spending(where="d", most_calls=None, most_tokens=None)


def opening(open_server, spending=UNLIMITED, **settings):
    chosen = JudgeSection(url=CountingServer.url, rubric="{{ answer }}", low=0, high=10, **settings)
    return Judge(chosen, open_server=open_server, spending=spending)


def with_server(server, **settings):
    async def opened():
        return server

    return opening(opened, **settings)


async def test_calls_to_the_judge_stay_within_the_concurrency_limit():
    server = CountingServer()
    judge = with_server(server, concurrency=3, votes=2, temperature=1.0)
    await asyncio.gather(*(verdicts(judge, f"{n}a", f"{n}b") for n in range(5)))
    assert (server.most, server.calls) == (3, 20)


async def test_cancelled_call_to_the_judge_frees_its_concurrency_slot():
    server = CountingServer()
    server.free.clear()
    judge = with_server(server, concurrency=1)
    task = asyncio.ensure_future(verdicts(judge, "a", "b"))
    while not server.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.free.set()
    assert [each.reward for each in await verdicts(judge, "a", "c")] == [0.5, 0.5]


async def test_concurrent_calls_share_a_failed_connection_to_the_judge_and_later_calls_reconnect():
    opened, gate = 0, asyncio.Event()

    async def connect():
        nonlocal opened
        opened += 1
        await gate.wait()
        if opened == 1:
            raise EngineUnreachable("not there yet")
        return CountingServer()

    spending = Spending(where="d", most_calls=None, most_tokens=None)
    judge = opening(connect, spending)
    first = asyncio.ensure_future(verdicts(judge, "a"))
    others = asyncio.ensure_future(verdicts(judge, "b", "c"))
    while not opened:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    assert [each.reason for each in await others] == ["not there yet"] * 2 and opened == 1
    assert [each.reward for each in await verdicts(judge, "a", "b")] == [0.5, 0.5]
    assert (opened, spending.calls) == (2, 2), "only calls that were made are counted"
    await judge.close()


async def test_answer_gets_a_verifier_error_if_the_problem_lacks_a_field_that_the_rubric_names():
    chosen = JudgeSection(url=CountingServer.url, rubric="{{ answer }} {{ hint }}", low=0, high=1)
    judge = Judge(chosen, open_server=None, spending=Spending(where="d", most_calls=0, most_tokens=0))
    (verdict,) = await verdicts(judge, "a")
    assert verdict.outcome is Outcome.VERIFIER_ERROR and 'rubric: field "hint" is missing' in verdict.reason


JSON = ScoreFormat(low=1, high=10)
PATTERN = ScoreFormat(low=0, high=5, pattern=re.compile(r"Score: (\S+)"))


@pytest.mark.parametrize(
    ("reply", "score", "reason"),
    [
        ('{"score": 7, "reason": "good"}', 7, "good"),
        ('Let me think {well}.\n```json\n{"reason": "a } b", "score": 1.5}\n```', 1.5, "a } b"),
        ('{"score": 3} So I say {"score": 3.0, "reason": "r"}', 3, "r"),
        ('{"reason": 5, "score": 10}', 10, ""),
        ('{"score": " 7.5 "}', 7.5, ""),
    ],
)
def test_single_score_in_a_judges_reply_is_read(reply, score, reason):
    assert JSON.read(reply) == (score, reason)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("", "has no score"),
        ("seven", "has no score: 'seven'"),
        ('{"score": "8/10"}', "no score"),
        ('{"score": "١"}', "no score"),
        ('{"score": 1' + "0" * 400 + "}", "no score"),
        ('{"score": [7]}', "no score"),
        ('{"score": true}', "no score"),
        ('{"score": NaN}', "no score"),
        ('{"score": 1e999}', "no score"),
        ('{"score": 11}', "the score 11, which is not from 1 to 10"),
        ('{"score": 0.99}', "not from 1 to 10"),
        ('{"score": 1} {"score": 10}', "more than one score: 1, 10"),
        ('{"score": ' + "1" * 100_000 + "}", "no score"),
        ("{" * 100_000, "opening braces"),
        ('{"a":' * 150, "no score"),
    ],
)
def test_judges_reply_without_exactly_one_valid_score_is_rejected(reply, sentence):
    with pytest.raises(Unreadable, match=sentence):
        JSON.read(reply)


def test_judges_score_is_read_from_the_capture_group_of_the_recipes_regular_expression():
    assert PATTERN.read("So.\nScore: 4.5") == (4.5, "")
    for reply, sentence in (("4", "no score"), ("Score: 9", "not from 0 to 5"),
                            ("Score: x", "must be a number, got 'x'"), ("Score: 1 Score: 2", "more than one"),
                            ("Score: nan", "no score")):  # fmt: skip
        with pytest.raises(Unreadable, match=sentence):
            PATTERN.read(reply)
