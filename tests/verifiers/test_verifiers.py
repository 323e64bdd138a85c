"""Verifiers on correct, wrong and hostile answers; failures of a verifier itself never count as wrong."""

import asyncio
import inspect
import json
import re
import time
from pathlib import Path

import pytest

from pipelinerl.data.problems import Split, open_source
from pipelinerl.system import gym_tasks
from pipelinerl.types import Outcome
from pipelinerl.verifiers import reasoning_gym
from pipelinerl.verifiers.reasoning_gym import UNSAFE_TASKS, ReasoningGym
from pipelinerl.verifiers.verifier import PerAnswerVerifier, SampledAnswer
from tests.fakes.problems import problem
from tests.patience import PATIENCE_S


def spelling(index=0):
    return open_source("reasoning_gym:spell_backward", domain="d", split=Split.TRAIN, seed=0).problem(index)


async def test_reasoning_gym_verifier_accepts_only_the_full_score_of_each_problems_own_solution(monkeypatch):
    made, create = [], gym_tasks.create_dataset
    monkeypatch.setattr(gym_tasks, "create_dataset", lambda task, **given: made.append(task) or create(task, **given))
    verifier, problems = ReasoningGym(), [spelling(i) for i in range(20)]
    made.clear()
    right = await asyncio.gather(*(verifier.verify(given, given.ground_truth) for given in problems))
    assert {(verdict.outcome, verdict.reward) for verdict in right} == {(Outcome.CORRECT, 1.0)}
    assert made == ["spell_backward"], "the scorer is loaded once"
    truth = problems[0].ground_truth
    for wrong in (problems[1].ground_truth, truth[:-1], "", "x<"):
        verdict = await verifier.verify(problems[0], wrong)
        assert (verdict.outcome, verdict.reward) == (Outcome.WRONG, 0.0)
    tagged = f"<answer>no</answer> I mean <answer> {truth} </answer>."
    assert (await verifier.verify(problems[0], tagged)).outcome is Outcome.CORRECT


async def test_reasoning_gym_problem_that_cannot_be_scored_gives_a_verifier_error():
    verifier = ReasoningGym()
    for metadata in (
        {},
        {"task": "countdown", "parameters": {}, "index": 1},
        {"task": "?", "parameters": {}, "index": 1},
    ):
        assert (await verifier.verify(problem("1", **metadata), "1")).outcome is Outcome.VERIFIER_ERROR


async def test_verdicts_of_the_fast_path_without_a_worker_equal_those_from_a_worker():
    first, gym = spelling(), ReasoningGym()
    assert gym.at_once(first, "x") is None  # no verdict, because the task's scorer is not loaded yet
    texts = [first.ground_truth, "x", first.ground_truth, "x"]
    waited = [await gym.verify(first, text) for text in texts]
    answers = [SampledAnswer(text) for text in texts]
    judged = await PerAnswerVerifier(gym).judge(first, answers)
    assert [each.verdict for each in judged] == waited == [gym.at_once(first, text) for text in texts]
    assert judged[0] is judged[2]  # one verdict for equal answers


def test_reasoning_gym_tasks_whose_scorer_executes_the_answer_are_rejected():
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    assert Path(reasoning_gym.__file__).is_file()
    running = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    unsafe = set()
    for task, (dataset, _) in DATASETS.items():
        methods = [m for name, m in inspect.getmembers(dataset, inspect.isfunction) if not name.startswith("__")]
        # Only methods that take an answer matter: a task may safely evaluate the library's own text to make problems.
        if any(running.search(inspect.getsource(m)) and "answer" in inspect.signature(m).parameters for m in methods):
            unsafe.add(task)
    assert unsafe - UNSAFE_TASKS <= {"number_sorting"}  # it evaluates only the library's own reference answer
    assert unsafe


async def test_answer_that_crashes_a_scorer_is_wrong_unless_the_ground_truth_also_crashes_the_scorer():
    def scorer(index, answer):
        return float(answer.encode("ascii") == b"truth")

    assert reasoning_gym._scored(scorer, 0, "\u0663", "truth") == 0.0
    assert "UnicodeEncodeError" in str(reasoning_gym._scored(scorer, 0, "\u0663", "\u0664"))


async def test_unusually_long_answer_is_scored_in_a_worker_process():
    given, verifier = spelling(), ReasoningGym(deadline_s=PATIENCE_S)
    try:
        assert (await verifier.verify(given, given.ground_truth)).outcome is Outcome.CORRECT
        assert not verifier._pool._forkers
        assert (await verifier.verify(given, "x" * 10**6)).outcome is Outcome.WRONG
        assert verifier._pool._forkers
    finally:
        await verifier.close()


@pytest.mark.parametrize(
    ("cpu_ms", "waits_ms", "slow"),
    [
        ([1.9] * 50, 0, False),
        ([1.9] * 50, 100, False),
        ([4, 4, 4, 1, 4, 4, 4], 0, False),
        ([1, 4, 4, 4, 4], 0, True),
        ([1, 60, 60], 0, True),
    ],
    ids=["quick", "quick on a busy machine", "three slow in a row", "four slow in a row", "two very slow"],
)
async def test_scorer_counts_as_slow_by_cpu_time_and_not_elapsed_time(cpu_ms, waits_ms, slow, monkeypatch):
    verifier, taken = ReasoningGym(), iter(cpu_ms)
    clock_s = elapsed_s = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: clock_s)
    monkeypatch.setattr(time, "perf_counter", lambda: elapsed_s)

    def scorer(index, answer):
        nonlocal clock_s, elapsed_s
        spent_s = next(taken) / 1000
        clock_s, elapsed_s = clock_s + spent_s, elapsed_s + spent_s + waits_ms / 1000
        return 1.0

    given = problem("a", task="spell_backward", parameters={}, index=1)
    name = json.dumps(["spell_backward", {}])
    verifier._scorers[name] = scorer
    for _ in cpu_ms:
        assert (await verifier.verify(given, "a")).outcome is Outcome.CORRECT
    assert (name in verifier._slow) is slow
    await verifier.close()
