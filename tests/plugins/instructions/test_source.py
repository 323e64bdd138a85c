"""The source `instructions`: solvable, deterministic problems of the configured difficulty."""

import pytest

from pipelinerl.data.problems import Split, open_source
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions.catalogue import CATALOGUE, followed, instructions_of
from pipelinerl.plugins.instructions.instruction import id_of, stated
from pipelinerl.plugins.instructions.source import TOPICS


def problems(count, *, seed=0, split=Split.TRAIN, **parameters):
    source = open_source("instructions", domain="d", split=split, seed=seed, parameters=parameters)
    return [source.problem(index) for index in range(count)]


@pytest.mark.parametrize("level", [1, 3, 5])
@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (2, 5)])
def test_reference_answer_of_every_generated_problem_follows_its_instructions(level, fewest, most):
    for problem in problems(120, level=level, min_instructions=fewest, max_instructions=most):
        instructions = instructions_of(problem.metadata)
        assert all(followed(instructions, problem.ground_truth)), problem
        assert fewest <= len(instructions) <= most and problem.tags == (f"instructions={len(instructions)}",)
        for each in instructions:
            assert stated(each) in problem.messages[-1].content
        assert not any(followed(instructions, "")) and len(set(map(id_of, instructions))) == len(instructions)


def test_reference_answers_have_the_configured_length():
    kinds = ["punctuation:no_comma"]
    for sentences in (1, 4):
        texts = [problem.ground_truth for problem in problems(40, sentences=sentences, kinds=kinds)]
        assert {text.count(".") for text in texts} == {sentences}
    assert problems(40, kinds=kinds) == problems(40, kinds=kinds, sentences=3)


def test_generated_problems_use_every_kind_of_instruction_except_response_language():
    kinds = {each["id"] for problem in problems(400) for each in problem.metadata["instructions"]}
    assert kinds == CATALOGUE.keys() - {"language:response_language"}


def test_instruction_problems_depend_on_seed_and_index_and_splits_are_disjoint():
    assert problems(50) == problems(50) != problems(50, seed=1)
    by_split = [{problem.messages for problem in problems(60, split=split)} for split in Split]
    assert len(set.union(*by_split)) == sum(map(len, by_split))
    assert len(by_split[2]) == 60, "held-out problems must be distinct"


def test_higher_difficulty_level_raises_the_numbers_that_instructions_require():
    kinds = ["length_constraints:number_sentences"]
    counts = [
        max(p.metadata["instructions"][0]["num_sentences"] for p in problems(100, level=level, kinds=kinds))
        for level in (1, 5)
    ]
    assert counts[0] < counts[1]


def test_recipe_chooses_the_topics_and_kinds_of_instructions():
    for problem in problems(30, topics=["{} cheese"], kinds=["punctuation:no_comma"], max_instructions=1):
        assert "{} cheese" in problem.messages[-1].content
        assert problem.metadata["instructions"] == [{"id": "punctuation:no_comma"}]
    assert any(topic in problems(1)[0].messages[-1].content for topic in TOPICS)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"levels": 1}, "unknown field `levels`"),
        ({"level": 9}, "<= 5"),
        ({"kinds": ["no:such"]}, "kinds must be some of .*; got no:such"),
        ({"min_instructions": 4}, "min_instructions must be at most max_instructions"),
        ({"kinds": ["punctuation:no_comma"], "min_instructions": 2}, "no 2 of these kinds that can be combined"),
    ],
)
def test_invalid_or_incompatible_instruction_parameters_are_rejected(parameters, sentence):
    with pytest.raises(RecipeError, match=f"domains.d.parameters.*{sentence}"):
        problems(1, **parameters)
