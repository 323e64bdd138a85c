"""Checkers decide whether a program's output matches the expected answer; custom checkers are programs themselves."""

import pytest

from pipelinerl.plugins.oubliette.checkers import Checker, CheckerFailed, CustomChecker, Protocol, same
from pipelinerl.plugins.oubliette.runs import Ending, ProgramResult, Tier

EXACT, TOKENS, FLOAT = Checker.EXACT, Checker.TOKENS, Checker.FLOAT


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        ("1\n2\n", "1\n2\n", {EXACT, TOKENS, FLOAT}),
        ("1 \n2\n\n\n", "1\n2", {EXACT, TOKENS, FLOAT}),
        ("1\r\n2", "1\n2", {EXACT, TOKENS, FLOAT}),
        ("1 2", "1\n2", {TOKENS, FLOAT}),
        (" 1\n2", "1\n2", {TOKENS, FLOAT}),
        ("\n1", "1", {TOKENS, FLOAT}),
        ("", "\n", {EXACT, TOKENS, FLOAT}),
        ("1.0000001", "1", {FLOAT}),
        ("1000001", "1000000.5", {FLOAT}),
        ("1e3", "1000", {FLOAT}),
        ("-0", "0", {FLOAT}),
        ("-0.0", "0", {FLOAT}),
        ("100000.0", "1e5", {FLOAT}),
        ("123456789", "123456790", set()),
        ("123456789.0", "123456790", {FLOAT}),
        ("+007", "7", {FLOAT}),
        ("7", "-7", set()),
        ("1" + "0" * 5000, "1" + "0" * 5000, {EXACT, TOKENS, FLOAT}),
        ("01" + "0" * 5000, "1" + "0" * 5000, {FLOAT}),
        ("1" + "0" * 5000, "2" + "0" * 5000, set()),
        ("1\t2  3\n", "1 2 3", {TOKENS, FLOAT}),
        ("inf", "inf", {EXACT, TOKENS, FLOAT}),
        ("infinity", "inf", {FLOAT}),
        ("1.00001", "1", set()),
        ("nan", "1", set()),
        ("nan", "0", set()),
        ("inf", "1", set()),
        ("1e400", "inf", set()),
        ("inf", "1e400", set()),
        ("-1e400", "-inf", set()),
        ("1e400", "1e401", set()),
        ("1e400", "1e400", {EXACT, TOKENS, FLOAT}),
        ("1_000", "1000", set()),
        ("0x10", "16", set()),
        ("1 2 3", "1 2", set()),
        ("1", "1 2", set()),
        ("", "0", set()),
        ("yes", "Yes", set()),
        ("9" * 500, "9" * 400, set()),
    ],
)
def test_each_builtin_checker_accepts_exactly_the_matching_outputs(output, answer, right):
    accepting = {checker for checker in Checker if same(output.encode(), answer.encode(), checker, 1e-6)}
    assert accepting == right


def result(code=0, stdout=b"", stderr=b"", ending=Ending.EXITED):
    return ProgramResult(
        ending=ending, code=code, stdout=stdout, stderr=stderr, cpu_s=0.0, wall_s=0.0, tier=Tier.DEFAULT
    )


def checker(protocol):
    return CustomChecker(language="python", source="", protocol=protocol)


TESTLIB = [
    (result(0), 1.0), (result(1), 0.0), (result(2), 0.0), (result(8), 0.0),
    (result(7, stderr=b"points 0.25 good"), 0.25), (result(7, stderr=b"partially correct (0.5)"), 0.5),
    (result(1, stderr=b"Traceback (most recent call last):\n x"), None), (result(3), None), (result(7), None),
    (result(0, stderr=b"it wrote 'Traceback (most recent call last):'"), 1.0),
    (result(-11, ending=Ending.SIGNALLED), None),
    (result(0, ending=Ending.DEADLINE), None), (result(0, ending=Ending.STARVED), None),
]  # fmt: skip
PRINTED = [
    (result(stdout=b"1\n"), 1.0), (result(stdout=b"0"), 0.0), (result(stdout=b"0.5\n"), 0.5),
    (result(stdout=b"2"), None), (result(stdout=b"-1"), None), (result(stdout=b"nan"), None),
    (result(stdout=b"1\n1"), None), (result(stdout=b""), None), (result(1, stdout=b"1"), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "program_result", "share"),
    [*((Protocol.TESTLIB, *case) for case in TESTLIB), *((Protocol.PRINTED, *case) for case in PRINTED)],
)
def test_result_of_a_checker_program_is_translated_to_a_score_or_a_failure(protocol, program_result, share):
    if share is None:
        with pytest.raises(CheckerFailed):
            checker(protocol).share(program_result)
    else:
        assert checker(protocol).share(program_result) == share


def test_checker_gets_its_file_arguments_in_the_order_of_its_protocol():
    for protocol, order in (
        (Protocol.TESTLIB, ("input.txt", "output.txt", "answer.txt")),
        (Protocol.PRINTED, ("input.txt", "answer.txt", "output.txt")),
    ):
        run = checker(protocol).checking(b"", b"in", b"out", b"answer")
        assert run.arguments == order
        assert dict(run.files) | {"main.py": b""} == {
            "main.py": b"", "input.txt": b"in", "output.txt": b"out", "answer.txt": b"answer"
        }  # fmt: skip
