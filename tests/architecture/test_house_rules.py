"""Tests that the source tree keeps each rule for the whole tree, and that each rule rejects a tree that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.architecture.house_rules import (
    CALLED_FROM_OUTSIDE,
    Modules,
    definitions_have_callers,
    doors_are_closed,
    tree_is_as_drawn,
)
from tests.architecture.tree import ROOT, Module, project

Rule = Callable[[Modules], Iterator[str]]

#: Each rule with a tree that breaks it and one that keeps it; a tree maps paths to sources.
RULES: tuple[tuple[Rule, dict[str, str], dict[str, str]], ...] = (
    (
        definitions_have_callers,
        {"launch/a.py": "class A:\n    def f(self): ...", "launch/b.py": "from launch.a import A"},
        {
            "launch/a.py": "class A:\n    def f(self): ...\n@app.command()\ndef run(): ...",
            "launch/b.py": "from launch.a import A\nA().f()",
        },
    ),
    (
        doors_are_closed,
        {"pipelinerl/actor/a.py": "from pipelinerl.engines.http.pool import EnginePool"},
        {"pipelinerl/actor/a.py": "from pipelinerl.streams.stream import Stream"},
    ),
)  # fmt: skip


def _tree(sources):
    return tuple(Module(path, source) for path, source in sources.items())


@pytest.mark.parametrize("rule", [rule for rule, _, _ in RULES], ids=lambda rule: rule.__name__)
def test_project_follows_each_architecture_rule_about_the_whole_source_tree(rule):
    assert not (broken := list(rule(project()))), "\n".join([rule.__doc__ or "", *broken])


@pytest.mark.parametrize(("rule", "breaks", "keeps"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_whole_tree_architecture_rule_rejects_a_bad_tree_and_accepts_a_good_tree(rule, breaks, keeps):
    assert list(rule(_tree(breaks)))
    assert not list(rule(_tree(keeps)))


def test_forbidden_imports_by_config_and_training_modules_are_detected():
    config = Module("pipelinerl/config/a.py", "from pipelinerl.controller.state.knobs import HOTTEST")
    training = Module("pipelinerl/training/a.py", "from pipelinerl.weights.layout import layout_of")
    publisher = Module("pipelinerl/training/a.py", "from pipelinerl.weights.publisher import Publisher")
    assert list(doors_are_closed([config])) and list(doors_are_closed([training]))
    assert not list(doors_are_closed([publisher]))


def test_packages_named_in_the_architecture_docs_match_those_in_the_tree():
    drawing = (ROOT / "docs" / "understand" / "architecture.md").read_text()
    assert not (broken := list(tree_is_as_drawn(project(), drawing))), "\n".join(broken)
    assert list(tree_is_as_drawn(project(), drawing + "`pipelinerl/attic/`"))
    assert list(tree_is_as_drawn(project(), ""))


def test_files_listed_as_exceptions_to_whole_tree_architecture_rules_exist():
    assert {module.path for module in project()} >= CALLED_FROM_OUTSIDE.keys()
