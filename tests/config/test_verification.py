"""Tests of the recipe's choice of who judges answers: actors or services."""

from __future__ import annotations

import pytest

from pipelinerl.config.recipe import load
from pipelinerl.errors import RecipeError


@pytest.mark.parametrize(
    ("changes", "uses_services"),
    [
        ([], False),
        (["verification.services=2"], True),
        (["verification.judged_in=services"], True),
        (["verification.judged_in=actors"], False),
    ],
)
def test_services_judge_if_any_are_started_or_the_recipe_says_so(changes: list[str], uses_services: bool) -> None:
    assert load("tiny", changes).verification.uses_services is uses_services


def test_services_that_would_be_unused_are_rejected() -> None:
    with pytest.raises(RecipeError, match="they would be unused"):
        load("tiny", ["verification.services=1", "verification.judged_in=actors"])
