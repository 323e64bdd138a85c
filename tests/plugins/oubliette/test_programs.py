"""Tests of the source `programs`: a reference program passes its problem's tests; printing the input fails them."""

import io
import re
from contextlib import redirect_stdout

import pytest

from pipelinerl.data.problems import Split
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.oubliette.code_problem import CodeProblem, program_block
from pipelinerl.plugins.oubliette.programs import open_programs


def source(split=Split.TRAIN, **parameters):
    return open_programs(SourceRequest(domain="code", split=split, seed=3, parameters=parameters))


def printed(program, given):
    """Return a program's output. Running it here is safe: this project generated it, not a model."""
    output = io.StringIO()
    with redirect_stdout(output):
        exec(program, {"input": lambda: given.decode().strip()})
    return output.getvalue().encode()


def program_of(problem):
    block = program_block(problem.ground_truth, ["python"])
    assert block is not None
    return block.code


def test_reference_program_of_a_problem_passes_its_tests_and_a_program_that_prints_its_input_fails():
    made = source(operations=3, max_number=50, tests=4)
    seen = set()
    for index in range(300):
        problem = made.problem(index)
        tests = CodeProblem.of(problem).tests
        assert len(tests) == 4
        assert all(printed(program_of(problem), test.input) == test.answer for test in tests), problem
        seen.add(problem.tags)
        if problem.tags == ("operations=1",):
            assert tests[0].input != tests[0].answer
    assert seen == {("operations=1",), ("operations=2",), ("operations=3",)}


def test_generated_program_problems_depend_only_on_the_index_and_splits_are_disjoint():
    first, again = source(), source()
    assert [first.problem(i) for i in range(20)] == [again.problem(i) for i in reversed(range(20))][::-1]
    held_out = [source(Split.HELD_OUT, max_number=99).problem(i).messages for i in range(40)]
    trained = {source(max_number=99).problem(i).messages for i in range(200)}
    assert len(set(held_out)) == 40 and trained.isdisjoint(held_out)


def test_operand_of_a_nested_operation_in_a_generated_problem_is_in_parentheses():
    texts = [source(operations=2).problem(i).messages[0].content for i in range(200)]
    nested = [text for text in texts if "(" in text]
    assert nested and all(re.search(r"\((x|\d|the)[^()]*\)", text) for text in nested)


@pytest.mark.parametrize("parameters", [{"operations": 4}, {"tests": 0}, {"max_number": 1}, {"level": 2}])
def test_error_names_unknown_and_invalid_program_parameters(parameters):
    with pytest.raises(RecipeError, match=f"domains.code.parameters.*{next(iter(parameters))}"):
        source(**parameters)
