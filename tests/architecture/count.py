"""Print counts about the whole source tree, for reviews of its size and structure.

    python -m tests.architecture.count
    python -m tests.architecture.count request

Prints the product's lines, short files with one importer, and the modules of each folder. With `request` it sends a
chat request to an engine instead, and prints the files that the request runs through.
"""

import sys
from collections import Counter, defaultdict
from pathlib import PurePosixPath
from typing import Final

from tests.architecture.tree import project

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


def _print(title, lines):
    print(f"\n{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["request"]:
        from tests.architecture.traced_request import files_of_a_request  # imported here because it needs torch

        _print("files that a chat request runs through", files_of_a_request())
    else:
        modules = tuple(module for module in project() if not module.path.startswith("benchmarks/"))
        print(f"product: {sum(len(module.source.splitlines()) for module in modules)} lines in {len(modules)} files")
        alone = [f"{path} ({lines}) < {by}" for path, lines, by in short_with_one_importer(modules)]
        _print("files of at most 60 lines with one importer", alone)
        folders = Counter(str(PurePosixPath(module.path).parent) for module in modules if module.stem != "__init__")
        _print("folders", [f"{size:>3} {folder}" for folder, size in folders.most_common()])
