"""Print counts about the whole source tree, for reviews of its size and structure.

    python -m tests.architecture.count
    python -m tests.architecture.count request

Prints the sizes of product, core and tests, short files with one importer, and the modules of each folder. With
`request` it sends a chat request to an engine instead, and prints the files that the request runs through.
"""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import PurePosixPath
from typing import Final

from tests.architecture.tree import ROOT, project

SHORT: Final = 60
#: Modules that are started by their path. They must stay separate files, however short they are.
RUN_BY_PATH: Final = frozenset({"launch/reaper.py", "pipelinerl/system/supervised_process.py"})


def short_with_one_importer(modules):
    """Yield path, line count and importer of each file of at most 60 lines that exactly one other module imports."""
    names = {module.name: module for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in module.imports:
            known = target if target in names else target.rpartition(".")[0]
            if known in names and known != module.name:
                importers[known].add(module.path)
    for module in modules:
        lines = len(module.source.splitlines())
        alone = len(importers[module.name]) == 1 and module.stem != "__init__" and module.path not in RUN_BY_PATH
        if lines <= SHORT and alone:
            yield module.path, lines, *importers[module.name]


def _code(module):
    """Return the numbers of lines that hold code, of functions and of classes."""
    texts = [
        node for node in ast.walk(module.tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    lines = sum(bool(line.strip()) and not line.strip().startswith("#") for line in module.source.splitlines())
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(module.tree))
    classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(module.tree))
    written = (part.strip() for text in texts for part in str(text.value.value).splitlines())
    return lines - sum(map(bool, written)), functions, classes


def _sizes(name, modules):
    code, functions, classes = (sum(column) for column in zip(*map(_code, modules), strict=True))
    print(f"{name}: {sum(len(module.source.splitlines()) for module in modules)} lines in {len(modules)} files")
    print(f"  {code} of code, {functions} functions, {classes} classes, {code / classes:.0f} of code per class")


def _print(title, lines):
    print(f"\n{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["request"]:
        from tests.architecture.traced_request import files_of_a_request  # imported here because it needs torch

        _print("files that a chat request runs through", files_of_a_request())
    else:
        modules = tuple(module for module in project() if not module.path.startswith("benchmarks/"))
        core = [each for each in modules if not each.path.startswith(("pipelinerl/plugins/", "launch/cluster/"))]
        _sizes("product", modules)
        _sizes("core", core)
        print(f"tests: {sum(len(path.read_text().splitlines()) for path in (ROOT / 'tests').rglob('*.py'))} lines")
        alone = [f"{path} ({lines}) < {by}" for path, lines, by in short_with_one_importer(modules)]
        _print("files of at most 60 lines with one importer", alone)
        folders = Counter(str(PurePosixPath(module.path).parent) for module in modules if module.stem != "__init__")
        _print("folders", [f"{size:>3} {folder}" for folder, size in folders.most_common()])
