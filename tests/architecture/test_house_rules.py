"""Rules about the source tree as a whole (DESIGN sections 2, 3, 12): the tree keeps them, and each rule can fail.

Each rule maps all modules to violations. `rules.py` has the rules that can be checked for one module alone.
"""

import ast
import re
from pathlib import PurePosixPath

import pytest

from tests.architecture.tree import ROOT, Module, project, room_of

#: Files with public definitions that are used only from outside the packages, and the user of each.
CALLED_FROM_OUTSIDE = {
    "pipelinerl/plugins/external_engines/vllm/transfer.py": "vLLM calls the methods of its weight-transfer back ends",
    "inference_contract/errors.py": "a client raises the class whose code the answer names",
    "pipelinerl/plugins/watch/top/textual_app.py": "textual calls the methods of its widgets",
    "launch/supervisor.py": "tests kill what it runs by `pids`",
    "pipelinerl/observability/status.py": "a reader of `pipelinerl status --json` calls `RunStatus.from_json`",
    "pipelinerl/system/connection.py": "uvicorn, the transport and the parser call the methods of a connection",
    "pipelinerl/streams/records.py": "dead letters and further columns are read by whoever looks into a stream",
    "pipelinerl/engines/torch/page_cache.py": "transformers' models call the methods of their cache",
}

#: For each room (package), further rooms that it must not import although its floor would allow it, with reasons.
CLOSED_DOORS = {
    "actor": {"engines": "its sampler is a Protocol", "models": "engines tokenise"},
    "config": {
        "controller": "a recipe is values", "engines": "a recipe is values", "training": "a recipe is values",
        "trainers": "a recipe is values", "actor": "a recipe is values", "streams": "a recipe is values",
    },
}  # fmt: skip

#: The parts of `weights` that the training loop may import.
TRAINING_SEES_OF_WEIGHTS = frozenset({"pipelinerl.weights.publisher", "pipelinerl.weights.grace"})


def definitions_have_callers(modules):
    """Every public definition is used outside tests, is a command, or is listed with its reason."""
    modules = tuple(modules)
    used = {word for module in modules for word in _used(module.tree)}
    for module in _product(modules):
        if module.path in CALLED_FROM_OUTSIDE or "checks_of(globals()" in module.source:  # a kit calls its checks
            continue
        for owner, node in _public(module.tree):
            commanded = any(".command(" in ast.unparse(mark) for mark in node.decorator_list)
            if node.name not in used and not commanded:
                yield f"{module.path}: {owner}{node.name} has no caller outside tests"


def doors_are_closed(modules):
    """The rooms (packages) in `CLOSED_DOORS` do not import the rooms that are listed for them."""
    for module in _product(modules):
        here = "config" if module.name.startswith("pipelinerl.config") else room_of(module.name)
        for target in module.imports:
            reason = CLOSED_DOORS.get(here or "", {}).get(room_of(target) or "")
            if reason:
                yield f"{module.path} must not import {target}: {reason}"
            if here == "training" and room_of(target) == "weights" and not _among(target, TRAINING_SEES_OF_WEIGHTS):
                yield f"{module.path} must not import {target}: of weights, training knows the publisher and its grace"


def _among(target, allowed):
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def tree_is_as_drawn(modules, drawing):
    """docs/understand/architecture.md names every room (top-level folder) of `pipelinerl/`, and no missing room."""
    parts = (PurePosixPath(module.path).parts for module in modules)
    there = {"/".join(each[:2]) for each in parts if each[0] == "pipelinerl" and len(each) > 2}
    drawn = set(re.findall(r"`(pipelinerl/[a-z_]+)/`", drawing))
    yield from (f"docs/understand/architecture.md does not name {folder}/" for folder in sorted(there - drawn))
    yield from (f"docs/understand/architecture.md names the missing {folder}/" for folder in sorted(drawn - there))


def _product(modules):
    return (module for module in modules if not module.path.startswith("benchmarks/"))


def _public(tree):
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, definitions) and not node.name.startswith("_"):
            yield "", node
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, definitions) and not part.name.startswith("_"):
                        yield f"{node.name}.", part


def _used(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 120:
            # A string counts as a use, too: as a `module:attribute` reference, a quoted type or the name of a field.
            yield from re.findall(r"(?<=[:.\"'])\w+|^\w+$", node.value)


#: Each rule with a tree that breaks it and one that keeps it; a tree maps paths to sources.
RULES = (
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
