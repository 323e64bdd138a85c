"""The page of models says what a measurement of each family shows."""

from typing import Final

import pytest

from tests.families import zoo
from tests.families.models_page import COMMAND, PAGE, README, Records, page, sentence
from tests.families.survey import measured, verdicts

#: Families that the fast suite measures: with buffers and experts, with parameters that have no gradient, with capped
#: scores and logits, and as padded rows.
MEASURED: Final = ("glm4_moe", "laguna", "gemma2", "lfm2")


def test_records_have_every_family_of_the_zoo():
    assert Records.read().families.keys() == zoo.FAMILIES.keys(), f"run {COMMAND}"


def test_page_of_models_and_readme_say_what_the_records_say():
    records = Records.read()
    assert PAGE.read_text() == page(records), f"run {COMMAND}"
    assert sentence(records) in README.read_text(), f"run {COMMAND}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [*MEASURED, *(pytest.param(each, marks=pytest.mark.slow) for each in zoo.FAMILIES if each not in MEASURED)]
)
def test_record_of_each_family_is_what_the_product_makes_of_it(name):
    assert verdicts(measured(name)) == verdicts(Records.read().families[name]), f"run {COMMAND} {name}"
