"""The four tours of the code in docs/understand/architecture.md name files and definitions that exist."""

import ast
import re

import pytest

from tests.architecture.tree import ROOT

DRAWING = (ROOT / "docs" / "understand" / "architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`([a-z_/]+\.py)` `([A-Za-z_.]+)`", DRAWING)))
#: How many files each tour may name at most.
LENGTHS = {
    "A prompt becomes a step": 40,
    "A version is served": 24,
    "A knob takes effect": 12,
    "A request becomes a token": 12,
}


@pytest.mark.parametrize(("path", "name"), PLACES, ids="::".join)
def test_definition_named_in_the_architecture_docs_exists(path, name):
    body = ast.parse((ROOT / path).read_text()).body
    for word in name.split("."):
        definitions = [node for node in body if getattr(node, "name", None) == word]
        assert definitions, f"docs/understand/architecture.md leads to {name} in {path}, where {word} is not defined"
        body = getattr(definitions[0], "body", [])


def test_architecture_docs_describe_four_code_tours_with_a_limited_number_of_files():
    walks = re.split(r"^\*\*(.+)\*\*$", DRAWING, flags=re.MULTILINE)[1:]
    described = dict(zip(walks[::2], walks[1::2], strict=True))
    assert described.keys() == LENGTHS.keys()
    for name, steps in described.items():
        files = set(re.findall(r"`([a-z_/]+\.py)` `", steps))
        assert 5 <= len(files) <= LENGTHS[name], f"{name}: {len(files)} files"


def test_files_in_the_reading_list_of_the_architecture_docs_have_1200_to_2000_lines():
    names = re.findall(r"`([a-z_/]+\.py)`", DRAWING.partition("## An hour of reading")[2])
    assert 1200 <= sum((ROOT / name).read_text().count("\n") for name in names) <= 2000
