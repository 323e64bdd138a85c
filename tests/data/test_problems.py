"""Problem sources depend only on seed, split and index, and their splits are disjoint."""

import itertools

import pytest

from pipelinerl.data.problems import Split, open_source
from pipelinerl.errors import RecipeError

SPELLING = {"min_word_len": 3, "max_word_len": 4, "answer_pattern": "[a-z]+"}


def source(kind, split=Split.TRAIN, seed=0, domain="d", **parameters):
    return open_source(kind, domain=domain, split=split, seed=seed, parameters=parameters)


def prompts(problems, count):
    return [problems.problem(i).messages for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "parameters"), [("addition", {"max_digits": 2}), ("reasoning_gym:spell_backward", SPELLING)]
)
def test_splits_of_a_generator_are_disjoint_for_all_seeds(kind, parameters):
    seen = {
        split: {m for seed in (0, 1) for m in prompts(source(kind, split, seed, **parameters), 200)} for split in Split
    }
    for one, other in itertools.combinations(Split, 2):
        assert seen[one] and not seen[one] & seen[other]


def test_generated_problem_is_a_pure_function_of_seed_and_index():
    forwards, backwards = source("addition", Split.HELD_OUT), source("addition", Split.HELD_OUT)
    expected = [forwards.problem(i) for i in range(50)]
    assert [backwards.problem(i) for i in reversed(range(50))] == expected[::-1]
    train, again = source("addition"), source("addition")
    assert again.problem(77) == train.problem(77)
    assert [train.problem(i) for i in range(20)] != [source("addition", seed=1).problem(i) for i in range(20)]


def test_held_out_problems_are_distinct_and_requesting_more_than_exist_is_rejected():
    held_out = source("addition", Split.HELD_OUT, max_digits=1)  # of 100 possible problems, about 10 are held out
    with pytest.raises(RecipeError, match=r"holds? only \d+ distinct"):
        prompts(held_out, 100)
    many = prompts(source("addition", Split.HELD_OUT), 500)
    assert len(set(many)) == 500


def test_addition_answers_are_correct():
    for i in range(100):
        problem = source("addition").problem(i)
        a, b = problem.messages[0].content.removesuffix("=").split("+")
        assert int(problem.ground_truth) == int(a) + int(b)


def test_reasoning_gym_problems_follow_the_parameters_of_the_recipe():
    spelling = source("reasoning_gym:spell_backward", **SPELLING)
    problems = [spelling.problem(i) for i in range(100)]
    for problem in problems:
        assert problem.messages[0].content.endswith(" " + problem.ground_truth[::-1])
        assert problem.ground_truth.islower()
    assert {len(p.ground_truth) for p in problems} == {3, 4}


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("soduko", {}, "domains.d.source must be"),
        ("reasoning_gym:", {}, "domains.d.source must be"),
        ("reasoning_gym:no_such_task", {}, "refuses task 'no_such_task'"),
        ("reasoning_gym:spell_backward", {"min_word": 3}, "refuses"),
        ("reasoning_gym:spell_backward", {"min_word_len": 9, "max_word_len": 3}, "refuses"),
        ("reasoning_gym:spell_backward", {"size": 3}, "must not set size"),
        ("addition", {"digits": 3}, "takes max_digits"),
        ("addition", {"max_digits": 0}, "takes max_digits"),
        ("addition", {"answer_pattern": "("}, "regular expression"),
        ("files", {"path": "/no/such/file"}, "must be the path of a file or folder"),
        ("files", {"file": "x"}, "unknown file"),
    ],
)
def test_error_names_the_invalid_source_parameter(kind, parameters, message):
    with pytest.raises(RecipeError, match=message):
        source(kind, **parameters)


def test_answer_pattern_that_matches_no_generated_problem_is_rejected():
    with pytest.raises(RecipeError, match="widen the parameters or answer_pattern"):
        source("addition", answer_pattern="x").problem(0)


def test_numbered_tasks_are_split_and_reshuffled_in_each_epoch_and_their_numbers_are_problem_ids():
    of_split = {split: source("numbered", split, count=200) for split in (Split.TRAIN, Split.HELD_OUT)}
    epoch = [of_split[Split.TRAIN].problem(i) for i in range(400)]
    numbers = [problem.metadata["index"] for problem in epoch]
    distinct = len(set(numbers))
    assert sorted(numbers[:distinct]) == sorted(numbers[distinct : 2 * distinct]) and 130 < distinct < 190
    assert numbers[:distinct] != numbers[distinct : 2 * distinct]
    assert of_split[Split.HELD_OUT].problem(0).metadata["index"] not in numbers
    assert epoch[0].problem_id == f"d:{numbers[0]}" and epoch[0].messages[0].content == f"Task {numbers[0]}"
    with pytest.raises(RecipeError, match=r"held_out split holds \d+ tasks; .* raise parameters.count"):
        of_split[Split.HELD_OUT].problem(100)
    with pytest.raises(RecipeError, match="held_out split has none of 1 tasks"):
        source("numbered", Split.HELD_OUT, count=1)
    with pytest.raises(RecipeError, match="missing required field `count`"):
        source("numbered")
