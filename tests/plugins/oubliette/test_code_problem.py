"""Test cases are read in the layouts of public data sets, and the program is extracted from a model's answer."""

import json

import pytest

from pipelinerl.plugins.oubliette.checkers import Checker, CustomChecker, Protocol
from pipelinerl.plugins.oubliette.code_problem import CodeProblem, CodeTest, TestsMalformed, program_block
from pipelinerl.plugins.oubliette.repository import Link
from tests.fakes.problems import problem

PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "6\n"}]
#: The second pair, as LiveCodeBench packs private tests: base64 of a zlib stream of a pickled JSON text.
PACKED = "eJxrYJmqzgABPcrR1UqZeQWlJUpWCkrGMXlKOgpK+aUlUAEzoEBt7BQ9ADC5DVA="
WANTED = (CodeTest(b"1\n", b"2\n"), CodeTest(b"3\n", b"6\n"))


def read(ground_truth="", **metadata):
    return CodeProblem.of(problem(ground_truth, **metadata))


@pytest.mark.parametrize(
    "metadata",
    [
        {"tests": PAIRS},
        {"tests": json.dumps(PAIRS)},
        {"official_tests": PAIRS},
        {"public_tests": {"input": ["1\n"], "output": ["2\n"]}, "private_tests": {"input": ["3\n"], "output": ["6\n"]}},
        {
            "public_tests": {"input": ["1\n", "3\n"], "output": ["2\n", "6\n"]},
            "generated_tests": {"input": [], "output": []},
        },
        {"input_output": {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]}},
        {"input_output": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]})},
        {"public_test_cases": json.dumps([{**pair, "testtype": "stdin"} for pair in PAIRS])},
        {"public_test_cases": PAIRS[:1], "private_test_cases": json.dumps(PAIRS[1:])},
        {"public_test_cases": json.dumps(PAIRS[:1]), "private_test_cases": PACKED},
        {"public_tests": PAIRS[:1], "private_tests": PAIRS[1:]},
        {"tests": {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]}},
        {"tests": json.dumps([{**pair, "type": "stdin_stdout", "fn_name": None} for pair in PAIRS])},
        {"verification_info": {"language": "python", "test_cases": [{**p, "type": "stdin_stdout"} for p in PAIRS]}},
        {"verification_info": json.dumps({"language": "python", "test_cases": json.dumps(PAIRS)})},
        {"test_cases": json.dumps(json.dumps(PAIRS))},
        {"ground_truth": json.dumps(PAIRS)},
        {"ground_truth": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]})},
    ],
)
def test_cases_are_read_in_the_layouts_of_public_data_sets(metadata):
    assert read(**metadata).tests == WANTED


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "has no tests: its metadata must have one of tests, test_cases, official_tests"),
        ({"tests": []}, "has no tests"),
        ({"tests": 5}, "tests must be a list of objects"),
        ({"tests": "{"}, "tests must be tests, or tests as JSON"),
        ({"tests": [{"input": "1"}]}, r"tests\[0\] must have input and output"),
        ({"private_test_cases": PACKED[:-4]}, "private_test_cases must be tests, or tests as JSON"),
        (
            {"private_test_cases": "eJxrYJnKzQABsVM0vBl7GCumpOoBAC1OBLY="},
            "private_test_cases must be tests, or tests as JSON",
        ),
        ({"tests": [{"input": "1", "output": "2", "type": "function_call"}]}, "calls a function"),
        ({"tests": [{"input": 1, "output": "2"}]}, r"tests\[0\]\.input must be a text, got int 1"),
        ({"public_tests": {"input": ["1"], "output": []}}, "as many inputs as outputs"),
        ({"input_output": {"fn_name": "add", "inputs": [], "outputs": []}}, "calls the function add"),
        ({"public_test_cases": [{"input": "", "output": "", "testtype": "functional"}]}, "calls a function"),
        ({"tests": PAIRS, "time_limit": "2"}, "time_limit must be seconds"),
        ({"tests": PAIRS, "time_limit": 0}, "time_limit must be seconds"),
        ({"tests": PAIRS, "time_limit": True}, "time_limit must be seconds"),
        ({"tests": PAIRS, "time_limit": {"seconds": "x"}}, "time_limit must be seconds"),
        ({"tests": PAIRS, "memory_limit": 1e9}, "memory_limit must be from 1 MB"),
        ({"tests": PAIRS, "checker": "fuzzy"}, "checker must be one of exact, tokens, float"),
        ({"tests": PAIRS, "checker": {"source": "x", "protocol": "shout"}}, r"checker\.protocol must be one of"),
        ({"tests": PAIRS, "checker": {"source": "x", "files": {"../x": ""}}}, r"checker\.files must be texts"),
        ({"tests": PAIRS, "checker": {"source": "x", "language": "cobol"}}, r"checker\.language must be one of"),
        ({"tests": PAIRS, "checker": {"program": "oub:1"}}, r"checker\.program: a link must be oub:"),
        ({"tests": [{"input": {"link": "1"}, "output": ""}]}, r"tests\[0\]\.input: a link must be oub:"),
        ({"tests": PAIRS, "interaction_format": "You talk first."}, "the problem is interactive"),
        ({"tests": PAIRS, "input_mode": "file"}, "input_mode must be stdio"),
    ],
)
def test_error_of_invalid_problem_metadata_names_the_field(metadata, message):
    with pytest.raises(TestsMalformed, match=message):
        read(**metadata)


def test_limits_and_checkers_are_read_from_a_problems_metadata():
    assert read(tests=PAIRS, time_limit={"seconds": 1, "nanos": 500_000_000}).time_limit_s == 1.5
    assert read(tests=PAIRS, time_limit=2).time_limit_s == 2.0
    assert read(tests=PAIRS, memory_limit=256).memory_bytes == 256 << 20
    assert read(tests=PAIRS, memory_limit_bytes=256_000_000).memory_bytes == 256_000_000
    assert read(tests=PAIRS, checker="float").checker is Checker.FLOAT
    custom = read(tests=PAIRS, checker={"language": "python", "source": "x", "protocol": "printed"}).checker
    assert isinstance(custom, CustomChecker)
    assert custom.protocol is Protocol.PRINTED
    generated = read(official_tests=PAIRS, generated_tests=7, generated_checker="print(1)", input_mode="stdio").checker
    assert generated == CustomChecker(language="python", source="print(1)", protocol=Protocol.PRINTED)


def test_inputs_and_outputs_of_test_cases_may_be_links_to_stored_data():
    link = Link.of(b"much")
    checker = {"language": "cpp", "program": str(link)}
    made = read(tests=[{"input": {"link": str(link)}, "output": str(link)}], checker=checker)
    assert made.tests == (CodeTest(link, str(link).encode()),), "a text is a text, whatever it says"
    assert made.checker == CustomChecker(language="cpp", source="", protocol=Protocol.TESTLIB, program=link)


PROGRAM = "print(1)\n"


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\nprint(1)\n```", ("python", PROGRAM)),
        ("a\n```\nx\n```\nb\n```cpp\ny\n```\nc", ("cpp", "y\n")),
        ("```py title=x\nx\n```", ("py", "x\n")),
        ("```{python}\nx\n```", ("python", "x\n")),
        ("```python:main.py\nx\n```", ("python", "x\n")),
        ("```C++\nx\n```", ("C++", "x\n")),
        ("  ~~~\nx\n  ~~~", ("", "x\n")),
        ("~~~python\nx\n```\n~~~~", ("python", "x\n```\n")),
        ("````md\n```python\nx\n```\n````", ("md", "```python\nx\n```\n")),
        ("```python\nprint('```')\n```", ("python", "print('```')\n")),
        ("```python\nx\n```\n```python\nnever closed", ("python", "x\n")),
        ("```python\r\nx\r\n```\r\n", ("python", "x\r\n")),
        ("1. So:\n\n   ```python\n   if 1:\n       x\n   ```\n", ("python", "if 1:\n    x\n")),
        ("1. ```python\n   if 1:\n       x\n   ```\n", ("python", "if 1:\n    x\n")),
        ("- So:\n\t```python\n\tif 1:\n\t\tx\n\t```\n", ("python", "if 1:\n    x\n")),
        ("   ```python\nx\n    y\n   ```\n", ("python", "x\n y\n")),
        ("> ```python\n> if 1:\n>     x\n>\n> ```\n", ("python", "if 1:\n    x\n\n")),
        (f"```python\n{PROGRAM}```\nOutput:\n```\n1\n```", ("python", PROGRAM)),
        (f"```python\n{PROGRAM}```\n```text\n1\n```", ("python", PROGRAM)),
        (f"```python\nx\n```\nBetter:\n```python\n{PROGRAM}```\n```bash\npython a.py\n```", ("python", PROGRAM)),
        (f"```\n{PROGRAM}```\n**Output:**\n```\n1\n```", ("", PROGRAM)),
        (f"Example input:\n```\n1\n```\nSo:\n```\n{PROGRAM}```", ("", PROGRAM)),
        ("Output:\n```\n1\n```", ("", "1\n")),
        ("```ruby\nx\n```", ("ruby", "x\n")),
        ("```ruby\nx\n```\n```\ny\n```", ("", "y\n")),
        ("```python\nnever closed", None),
        ("no code", None),
        ("", None),
        ("```python print(1) ```", None),
        ("```x\n" + "y" * (2 << 20) + "\n```", None),
    ],
)
def test_program_of_an_answer_is_its_last_closed_block_in_an_accepted_language(text, block):
    chosen = program_block(text, ["python", "cpp"])
    assert (chosen and chosen[:2]) == block
