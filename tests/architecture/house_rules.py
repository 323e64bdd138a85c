"""Rules about the source tree as a whole (DESIGN sections 2, 3, 12); each rule maps all modules to violations.

`rules.py` has the rules that can be checked for one module alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.architecture.tree import Module, room_of

Problems = Iterator[str]
Modules = Iterable[Module]

#: Files with public definitions that are used only from outside the packages, and the user of each.
CALLED_FROM_OUTSIDE = {
    "pipelinerl/plugins/external_engines/vllm/transfer.py": "vLLM calls the methods of its weight-transfer back ends",
    "inference_contract/errors.py": "a client raises the class whose code the answer names",
    "pipelinerl/plugins/watch/top/textual_app.py": "textual calls the methods of its widgets",
    "launch/supervisor.py": "tests kill what it runs by `pids`",
    "pipelinerl/observability/status.py": "a reader of `pipelinerl status --json` calls `RunStatus.from_json`",
    "pipelinerl/system/connection.py": "uvicorn, the transport and the parser call the methods of a connection",
    "pipelinerl/plugins/jax/engine/runner.py": "`num_programs` is the bound that its tests hold the compiler to",
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


def definitions_have_callers(modules: Modules) -> Problems:
    """Every public definition is used outside tests, is a command, or is listed with its reason."""
    modules = tuple(modules)
    used = {word for module in modules for word in _used(module.tree)}
    for module in _product(modules):
        if module.path in CALLED_FROM_OUTSIDE:
            continue
        for owner, node in _public(module.tree):
            commanded = any(".command(" in ast.unparse(mark) for mark in node.decorator_list)
            if node.name not in used and not commanded:
                yield f"{module.path}: {owner}{node.name} has no caller outside tests"


def doors_are_closed(modules: Modules) -> Problems:
    """The rooms (packages) in `CLOSED_DOORS` do not import the rooms that are listed for them."""
    for module in _product(modules):
        here = "config" if module.name.startswith("pipelinerl.config") else room_of(module.name)
        for target in module.imports:
            reason = CLOSED_DOORS.get(here or "", {}).get(room_of(target) or "")
            if reason:
                yield f"{module.path} must not import {target}: {reason}"
            if here == "training" and room_of(target) == "weights" and not _among(target, TRAINING_SEES_OF_WEIGHTS):
                yield f"{module.path} must not import {target}: of weights, training knows the publisher and its grace"


def _among(target: str, allowed: frozenset[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def tree_is_as_drawn(modules: Modules, drawing: str) -> Problems:
    """docs/understand/architecture.md names every room (top-level folder) of `pipelinerl/`, and no missing room."""
    parts = (PurePosixPath(module.path).parts for module in modules)
    there = {"/".join(each[:2]) for each in parts if each[0] == "pipelinerl" and len(each) > 2}
    drawn = set(re.findall(r"`(pipelinerl/[a-z_]+)/`", drawing))
    yield from (f"docs/understand/architecture.md does not name {folder}/" for folder in sorted(there - drawn))
    yield from (f"docs/understand/architecture.md names the missing {folder}/" for folder in sorted(drawn - there))


def _product(modules: Modules) -> Iterator[Module]:
    return (module for module in modules if not module.path.startswith("benchmarks/"))


def _public(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, definitions) and not node.name.startswith("_"):
            yield "", node
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, definitions) and not part.name.startswith("_"):
                        yield f"{node.name}.", part


def _used(tree: ast.Module) -> Iterator[str]:
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
