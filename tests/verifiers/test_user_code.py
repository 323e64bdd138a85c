"""Users' reward functions: every accepted form, and every kind of failure; a failure never counts as reward 0."""

import time
from pathlib import Path

import pytest

from pipelinerl.errors import RecipeError
from pipelinerl.types import Outcome, Verdict
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.problems import problem
from tests.fakes.verifiers import opened
from tests.patience import PATIENCE_S, SOON_S, is_running, wait_until

REWARDS = Path(__file__).with_name("rewards.py")
PROBLEM = problem("right", tags=("t=1",), level=3)


async def verdicts(function, *texts, **keys):
    """Judge the texts as one group, with this function of `rewards.py` as the verifier; return the verdicts."""
    async with opened(f"{REWARDS}:{function}", **{"verifier_workers": 1} | keys) as verifier:
        judged = await verifier.judge(PROBLEM, [SampledAnswer(text, (5, 6)) for text in texts])
    assert all(judgement.seconds >= 0 for judgement in judged)
    return [judgement.verdict for judgement in judged]


def in_short(results):
    return [(verdict.outcome.value, verdict.reward) for verdict in results]


async def test_reward_function_with_two_unknown_parameter_names_gets_problem_and_text_by_position():
    assert in_short(await verdicts("by_place", "right", "no")) == [("correct", 1.0), ("wrong", 0.0)]


async def test_reward_function_gets_each_argument_by_the_name_of_its_parameter():
    assert in_short(await verdicts("by_name", "right", "no")) == [("partial", 0.5), ("wrong", 0.0)]
    assert in_short(await verdicts("by_name", "right", correct_at=0.5)) == [("correct", 0.5)]


async def test_group_reward_function_gets_a_list_of_answers_and_must_return_one_reward_for_each():
    assert [verdict.reward for verdict in await verdicts("of_a_group", "a", "abc", "ab")] == [0.0, 2.0, 1.0]
    results = await verdicts("too_few", "a", "b")
    assert [verdict.outcome for verdict in results] == [Outcome.VERIFIER_ERROR] * 2
    expected = "too_few must return a list with one reward for each of 2 answers, it returned 1 of them"
    assert results[0].reason.endswith(expected) and f"{REWARDS}:" in results[0].reason


async def test_reward_function_parameters_get_the_data_columns_of_the_same_name_as_in_trl():
    assert in_short(await verdicts("by_column", "right", "no")) == [("correct", 1.0), ("wrong", 0.0)]
    assert [verdict.reward for verdict in await verdicts("of_a_group_by_column", "a", "abc")] == [0.0, 1.0]
    (missing,) = await verdicts("by_missing_column", "right")
    assert missing.outcome is Outcome.VERIFIER_ERROR
    assert "takes solution, and the problem's metadata has level; name the columns" in missing.reason


async def test_answer_that_crashes_a_reward_function_is_wrong_if_the_function_accepts_the_ground_truth():
    results = await verdicts("strict", "", "right", "offline", "\ud800")
    assert [verdict.outcome.value for verdict in results] == ["wrong", "correct", "verifier_error", "wrong"]
    assert "IndexError" in results[0].reason and "ConnectionError" in results[2].reason
    assert in_short(await verdicts("flaky", "no")) == [("verifier_error", 0.0)]


async def test_async_reward_function_runs_concurrently_and_is_cancelled_at_its_deadline():
    began = time.monotonic()
    results = await verdicts("asynchronous", "hang", "raise", "fine", verifier_timeout_s=1.5)
    assert in_short(results) == [("timeout", 0.0), ("verifier_error", 0.0), ("correct", 1.0)]
    assert time.monotonic() - began < SOON_S
    assert "rewards.py:" in results[1].reason and results[1].reason.endswith("KeyError: 'no such thing'")
    assert [verdict.reward for verdict in await verdicts("asynchronous_group", "ab", "a")] == [2.0, 1.0]


async def test_reward_function_may_return_a_bool_a_number_or_a_verdict():
    results = await verdicts("whatever", "true", "one", "float32", "bool_", "verdict", "")
    assert [verdict.reward for verdict in results] == [1.0, 1.0, 0.25, 1.0, 0.125, 0.0]
    assert results[4] == Verdict(outcome=Outcome.WRONG, reward=0.125, reason="so", answer="a")


async def test_failure_of_a_reward_function_affects_only_its_own_answer_and_names_its_cause():
    causes = {
        "raise": "ConnectionError: away",
        "exit": "SystemExit: 7",
        "own": "OwnError: mine",
        "generator": "GeneratorExit",
        "interrupt": "KeyboardInterrupt",
        "memory": "MemoryError",
        "os._exit": "the verifier's process ended with status 9",
        "kill": "was killed by SIGKILL; the machine may be out of memory",
        "segv": "was killed by SIGSEGV",
        "abort": "was killed by SIGABRT",
        "closes": "the verifier's process ended with status 1",
    }
    right = ("print", "forks", "fine")
    results = await verdicts("ends", *causes, *right)
    assert [verdict.outcome for verdict in results] == [Outcome.VERIFIER_ERROR] * len(causes) + [Outcome.CORRECT] * 3
    assert f"{REWARDS}:" in results[0].reason
    for cause, verdict in zip(causes.values(), results, strict=False):
        assert cause in verdict.reason


async def test_child_in_a_session_of_its_own_ends_with_the_reward_function_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "pid"))
    assert in_short(await verdicts("ends", "session", verifier_timeout_s=1.0)) == [("timeout", 0.0)]
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(child), "the child has ended")


@pytest.mark.parametrize("how", ["hang", "spin"])
async def test_reward_function_that_hangs_times_out_without_delaying_other_answers(how):
    began = time.monotonic()
    results = await verdicts("whatever", how, how, "one", verifier_timeout_s=1.0)
    assert in_short(results) == [("timeout", 0.0), ("timeout", 0.0), ("correct", 1.0)]
    assert results[0].reason == "no judgement within 1 s"
    assert time.monotonic() - began < PATIENCE_S


async def test_users_class_can_be_a_verifier_and_its_exceptions_give_verifier_errors():
    results = await verdicts("Judge", "right", "raise", "hang", "", verifier_timeout_s=1.5)
    assert [v.outcome.value for v in results] == ["correct", "verifier_error", "timeout", "verifier_error"]
    assert results[0].reward == 2.0 and "ValueError: not for me" in results[1].reason
    assert results[3].reason.endswith("Judge: verify must return a Verdict, it returned None")


async def test_reward_function_with_an_unknown_parameter_is_rejected():
    with pytest.raises(RecipeError, match=r"d.verifier: .*rewards.py:asks_too_much: .*; got weather"):
        await verdicts("asks_too_much", "a")


async def test_worker_process_whose_reward_module_starts_threads_is_not_forked(tmp_path):
    file = tmp_path / "threaded.py"
    file.write_text(
        "import threading, time, os\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def score(problem, text):\n"
        "    if text == 'hang': time.sleep(60)\n"
        "    return threading.active_count() == 2\n"
    )
    async with opened(f"{file}:score", verifier_workers=2, verifier_timeout_s=1.0) as verifier:
        first = await verifier.judge(PROBLEM, [SampledAnswer("a"), SampledAnswer("b"), SampledAnswer("hang")])
        again = await verifier.judge(PROBLEM, [SampledAnswer("c")])
    assert [each.verdict.outcome.value for each in (*first, *again)] == ["correct", "correct", "timeout", "correct"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def other(): ...", r"domains.d.verifier: .*r.py has no 'score'; it has other"),
        ("import no_such_library", r"r.py cannot be imported: .*r.py:1: ModuleNotFoundError: No module named 'no_such"),
        ("\nscore = 1 / 0", r"cannot be imported: .*r.py:2: ZeroDivisionError: division by zero"),
        ("def score(:", r"cannot be imported: .*r.py:1: SyntaxError: invalid syntax"),
        ("raise SystemExit('run me not')", r"cannot be imported: .*r.py:1: SystemExit: run me not"),
        ("score = 3", r"r.py:score must be a function or a class, got int"),
    ],
)
async def test_reward_function_that_cannot_be_loaded_is_reported_in_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "r.py"
    file.write_text(text)
    with pytest.raises(RecipeError, match=sentence) as raised:
        async with opened(f"{file}:score"):
            pass
    assert "\n" not in str(raised.value)
