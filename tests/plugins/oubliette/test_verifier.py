"""Tests of the verifier `Oubliette`, which runs the program in a model's answer on the problem's test cases."""

import asyncio
from functools import partial
from typing import final

import pytest

from pipelinerl.plugins.oubliette import verifier as verifiers
from pipelinerl.plugins.oubliette.checkers import Scoring
from pipelinerl.plugins.oubliette.repository import ContentMissing, Link
from pipelinerl.plugins.oubliette.runner import Executed, Program
from pipelinerl.plugins.oubliette.runs import Ending, ProgramResult, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.verifier import Oubliette, PythonTool
from pipelinerl.system.service_client import Grace
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.problems import problem
from tests.fakes.verifiers import opened
from tests.patience import PATIENCE_S

RULES = OublietteSection(languages=("python", "c"), time_limit_s=PATIENCE_S)
DOUBLES = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(6)]
RIGHT = "print(2 * int(input()))"
HALF = "n = int(input())\nprint(2 * n if n < 3 else 0)"


@pytest.fixture
async def oubliette(sandbox):
    verifier = Oubliette(RULES, deadline_s=PATIENCE_S)
    yield verifier
    await verifier.close()


async def judged(verifier, code, language="python", **metadata):
    return await verifier.verify(
        problem(**{"tests": DOUBLES} | metadata), f"It is so:\n```{language}\n{code}\n```\nand done."
    )


async def test_correct_and_wrong_programs_are_judged_correct_and_wrong(oubliette):
    verdict = await judged(oubliette, RIGHT)
    assert (verdict.outcome, verdict.reward) == (Outcome.CORRECT, 1.0)
    assert verdict.reason == "6 of 6 tests passed [default sandbox]"
    c = '#include <stdio.h>\nint main(void) { int n; return scanf("%d", &n) != 1 || printf("%d", 2 * n) < 0; }'
    assert (await judged(oubliette, c, "c")).outcome is Outcome.CORRECT
    for code, reason in (
        (HALF, "test 4 of 6: wrote b'0\\n'"),
        ("1/0", "test 1 of 6: exit status 1: ZeroDivisionError: division by zero"),
        ("print(", "SyntaxError"),
        (f"{RIGHT}\nimport sys\nsys.exit(1)", "exit status 1"),
        ("print('x' * 10**6)", "exceeded its output limit"),
    ):
        verdict = await judged(oubliette, code)
        assert (verdict.outcome, verdict.reward) == (Outcome.WRONG, 0.0)
        assert reason in verdict.reason
    verdict = await judged(oubliette, "int main(void) { return }", "c")
    assert verdict.outcome is Outcome.WRONG
    assert "does not compile" in verdict.reason


async def test_answer_without_a_program_is_wrong_with_a_reason(oubliette):
    assert "no closed fenced block" in (await oubliette.verify(problem(tests=DOUBLES), RIGHT)).reason
    verdict = await judged(oubliette, "puts 1", "ruby")
    assert verdict.outcome is Outcome.WRONG
    assert "the code is in 'ruby'; accepted are python, c" in verdict.reason


async def test_program_over_its_limit_is_judged_wrong_but_a_missed_verifier_deadline_is_a_timeout(sandbox, oubliette):
    verdict = await judged(oubliette, "while True: pass", time_limit=0.2)
    assert verdict.outcome is Outcome.WRONG
    assert "processor time" in verdict.reason or "elapsed time" in verdict.reason
    hurried = Oubliette(RULES, deadline_s=2.0)
    try:
        verdict = await judged(hurried, "import time\ntime.sleep(3600)")
        assert (verdict.outcome, verdict.reason) == (Outcome.TIMEOUT, "no judgement within 2 s")
    finally:
        await hurried.close()


CHECKER = """
import sys
given, output, answer = (open(name).read() for name in sys.argv[1:])
assert int(given) * 2 == int(answer)
sys.exit(0 if output.split() == ["about", answer.strip()] else 1)
"""


async def test_custom_checker_runs_in_another_sandbox_guest_than_the_program(oubliette):
    own = {"checker": {"language": "python", "source": CHECKER}}
    assert (await judged(oubliette, "print('about', 2 * int(input()))", **own)).outcome is Outcome.CORRECT
    verdict = await judged(oubliette, RIGHT, **own)
    assert verdict.outcome is Outcome.WRONG
    assert "the problem's checker rejects the output" in verdict.reason
    seen = "import os\nprint('about', 2 * int(input()), *os.listdir('/tmp'))"
    assert (await judged(oubliette, seen, **own)).outcome is Outcome.WRONG
    assert await _masked(oubliette, checker={"language": "python", "source": "1/0"})
    assert await _masked(oubliette, checker={"language": "python", "source": "import sys\nsys.exit(3)"})
    assert await _masked(oubliette, checker={"language": "c", "source": "no c"})
    assert await _masked(oubliette, checker={"language": "cobol", "source": ""})


#: A checker program, for both protocols of checkers, that crashes on output that is not UTF-8.
TEXT_CHECKER = """
import sys
names = {name.partition(".")[0]: open(name).read() for name in sys.argv[1:]}
right = names["output"].split() == names["answer"].split()
print(int(right))
sys.exit(0 if right or PRINTED else 1)
"""


@pytest.mark.parametrize("protocol", ["testlib", "printed"])
async def test_output_that_crashes_a_checker_is_wrong_if_the_checker_accepts_the_reference_output(oubliette, protocol):
    crash = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')"
    source = TEXT_CHECKER.replace("PRINTED", str(protocol == "printed"))
    checker = {"language": "python", "source": source, "protocol": protocol}
    assert (await judged(oubliette, RIGHT, checker=checker)).outcome is Outcome.CORRECT
    verdict = await judged(oubliette, crash, checker=checker)
    assert verdict.outcome is Outcome.WRONG, verdict.reason
    assert "the problem's checker rejects the output" in verdict.reason
    broken = checker | {"source": "1/0\n" + source}
    assert (await judged(oubliette, crash, checker=broken)).outcome is Outcome.VERIFIER_ERROR


async def _masked(oubliette, **metadata):
    return (await judged(oubliette, RIGHT, **metadata)).outcome is Outcome.VERIFIER_ERROR


async def test_sandboxed_program_cannot_read_the_reference_answer(oubliette):
    """The program prints everything that it can read; the expected word is only in the reference answer."""
    word = "xyzzy-the-answer"
    search = (
        "import os\nseen = [sys.stdin.read()] if (sys := __import__('sys')) else []\n"
        "for top, _, names in os.walk('/tmp'):\n"
        "    seen += [open(f'{top}/{n}').read() for n in names if n != 'main.py']\n"
        "seen += [open(f'/proc/self/{n}', 'rb').read().decode('latin-1') for n in ('environ', 'cmdline')]\n"
        "for n in range(3, 200):\n"
        "    try: seen.append(open(f'/proc/self/fd/{n}').read())\n    except OSError: pass\n"
        "print(*seen)\n"
    )  # fmt: skip
    verdict = await judged(oubliette, search, tests=[{"input": "", "output": f"{word}\n"}])
    assert verdict.outcome is Outcome.WRONG
    assert "wrote b'" in verdict.reason, "it must have run to its end"
    assert word not in verdict.reason


async def test_answer_gets_a_verifier_error_if_test_cases_are_invalid_or_the_sandbox_is_missing(oubliette, monkeypatch):
    assert await _masked(oubliette, tests=[])
    assert await _masked(oubliette, tests="[")
    monkeypatch.setenv("PATH", "/nowhere")
    missing = Oubliette(RULES)
    verdict = await judged(missing, RIGHT)
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert "needs bubblewrap" in verdict.reason
    await missing.close()


async def test_cancelled_judgements_do_not_block_later_judgements(oubliette):
    await judged(oubliette, RIGHT)
    waiting = [asyncio.create_task(judged(oubliette, "import time\ntime.sleep(0.2)\n" + RIGHT)) for _ in range(6)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await judged(oubliette, RIGHT)).outcome is Outcome.CORRECT


async def test_code_domain_of_a_recipe_is_judged_by_the_share_of_tests_passed(sandbox):
    rules = OublietteSection(scoring=Scoring.SHARE, time_limit_s=PATIENCE_S)
    async with opened("oubliette", verifier_timeout_s=PATIENCE_S, oubliette=rules) as verifier:
        answers = [SampledAnswer(f"```\n{code}\n```") for code in (RIGHT, HALF, "1/0")]
        judgements = await verifier.judge(problem(tests=DOUBLES), answers)
    assert [judgement.verdict.reward for judgement in judgements] == [1.0, 0.5, 0.0]
    half = judgements[1].verdict
    assert half.outcome is Outcome.PARTIAL and half.reason.startswith("3 of 6 tests passed; test 4 of 6: ")


@final
class Forgetful:
    """A fake `CodeRunner` that loses the first `forgets` outputs before they are checked, like a killed service."""

    tier, at_once = "remote default", 1

    def __init__(self, *, forgets):
        self.forgets = forgets
        self.runs = 0

    async def compile(self, language, source, *, wall_s):
        return Program(language, source.encode())

    async def run(self, program, stdin, limits):
        self.runs += 1
        done = ProgramResult(
            ending=Ending.EXITED, code=0, stdout=b"", stderr=b"", cpu_s=0.0, wall_s=0.0, tier=Tier.DEFAULT
        )
        return Executed(done, Link.of(b""))

    async def check(self, check):
        self.forgets -= 1
        if self.forgets >= 0:
            raise ContentMissing("forgotten")
        return 1.0

    async def read(self, content):
        raise ContentMissing("forgotten")

    async def close(self):
        pass


def opening(*results):
    """Return a fake of `open_runner` that gives these results in order, repeating the last, and a list of its calls."""
    tries = []

    async def opened(rules, *, at_once):
        tries.append(at_once)
        await asyncio.sleep(0)
        come = results[min(len(tries), len(results)) - 1]
        if isinstance(come, SandboxLost):
            raise come
        return come

    return opened, tries


@pytest.mark.parametrize(("forgets", "outcome"), [(7, Outcome.CORRECT), (8, Outcome.VERIFIER_ERROR)])
async def test_program_is_run_again_if_the_sandbox_service_lost_its_output(forgets, outcome, monkeypatch):
    runner = Forgetful(forgets=forgets)
    monkeypatch.setattr(verifiers, "open_runner", opening(runner)[0])
    verdict = await judged(Oubliette(RULES), RIGHT, tests=DOUBLES[:1])
    assert (verdict.outcome, runner.runs) == (outcome, 8)


async def test_connection_to_a_briefly_unreachable_sandbox_service_is_retried(monkeypatch):
    away = SandboxLost("away")
    opened, tries = opening(away, away, Forgetful(forgets=0))
    monkeypatch.setattr(verifiers, "open_runner", opened)
    monkeypatch.setattr(verifiers, "Grace", partial(Grace, pause_s=0.0))
    verifier = Oubliette(RULES)
    verdicts = await asyncio.gather(*(judged(verifier, RIGHT, tests=DOUBLES[:1]) for _ in range(3)))
    assert [verdict.outcome for verdict in verdicts] == 3 * [Outcome.CORRECT]
    assert len(tries) == 3


async def test_concurrent_judgements_share_one_failed_attempt_to_connect_to_the_sandbox_service(monkeypatch):
    opened, tries = opening(SandboxLost("away"))
    monkeypatch.setattr(verifiers, "open_runner", opened)
    monkeypatch.setattr(verifiers, "_GRACE_S", 0.0)
    verifier = Oubliette(RULES)
    verdicts = await asyncio.gather(*(judged(verifier, RIGHT) for _ in range(3)))
    assert [(verdict.outcome, verdict.reason) for verdict in verdicts] == 3 * [(Outcome.VERIFIER_ERROR, "away")]
    assert len(tries) == 1
    await judged(verifier, RIGHT)
    assert len(tries) == 2, "a later judgement connects again"
    await verifier.close()
    assert (await judged(verifier, RIGHT)).reason == "the sandbox is closed"


@pytest.fixture
async def tool(sandbox):
    made = PythonTool(OublietteSection(time_limit_s=1.0), workers=1)
    yield made
    await made.close()


async def test_calls_of_the_python_tool_share_no_state(tool):
    assert await tool.call("x = 6\nopen('kept', 'w').write('x')\nprint(x * 7)") == ("42", False)
    shown, has_failed = await tool.call("print(x)")
    assert "NameError: name 'x' is not defined" in shown and has_failed
    assert "No such file" in (await tool.call("open('kept')"))[0]
    assert await tool.call("pass") == ("(the program printed nothing)", False)
    shown, _ = await tool.call("print('a' * 9000)")
    assert len(shown) < 4100 and "[5000 characters left out]" in shown
    assert "processor time" in (await tool.call("while True: pass"))[0], "the domain's limit"


async def test_python_tool_without_a_sandbox_fails_at_start_and_names_the_cause(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxMissing, match=r"python tool needs a sandbox: .*bubblewrap, which is not installed"):
        await PythonTool(OublietteSection()).start()
