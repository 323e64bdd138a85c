"""Print counts about the whole source tree, for reviews of its size and structure.

    python -m tests.architecture.count [field]
    python -m tests.architecture.count request

Prints the product's lines, short files with one importer, the modules of each folder, the declarations of `field`
(default: `slots`), the users of HTTP libraries and their clients, and public class names that occur twice. With
`request` it sends a chat request to an engine instead, and prints the files that the request runs through.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

from tests.architecture.tree import Module, project

SHORT: Final = 60
#: Modules that are started by their path. They must stay separate files, however short they are.
RUN_BY_PATH: Final = frozenset({"launch/reaper.py", "pipelinerl/system/supervised_process.py"})
HTTP: Final = frozenset({"httpx", "aiohttp", "http.client", "urllib.request", "urllib3", "requests"})
CLIENTS: Final = frozenset(
    {
        "httpx.AsyncClient", "httpx.Client", "aiohttp.ClientSession", "http.client.HTTPConnection",
        "urllib.request.urlopen", "urllib.request.build_opener", "urllib3.PoolManager", "requests.Session",
    }
)  # fmt: skip


def product() -> tuple[Module, ...]:
    """Return the modules that are shipped: contracts, package, launcher."""
    return tuple(module for module in project() if not module.path.startswith("benchmarks/"))


def short_with_one_importer(modules: Sequence[Module]) -> Iterator[tuple[str, int, str]]:
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


def declarations(modules: Iterable[Module], field: str) -> Iterator[str]:
    """Yield `path:line` of each annotated class attribute and each function argument named `field`."""
    for module in modules:
        for node in ast.walk(module.tree):
            attribute = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id
            argument = isinstance(node, ast.arg) and node.arg
            if field in (attribute, argument):
                yield f"{module.path}:{getattr(node, 'lineno', 0)}"


def http_users(modules: Iterable[Module]) -> Iterator[tuple[str, str, int]]:
    """Yield library, path and number of clients for each module that imports an HTTP library."""
    for module in modules:
        for library in sorted(HTTP):
            if any(target == library or target.startswith(f"{library}.") for target in module.imports):
                called = (ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call))
                yield library, module.path, sum(name in CLIENTS and name.startswith(library) for name in called)


def classes_twice(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the public class names that are declared more than once, with the places of their declarations."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.path}:{node.lineno}")
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def main(field: str) -> None:
    """Print every count."""
    modules = product()
    print(f"product: {sum(len(module.source.splitlines()) for module in modules)} lines in {len(modules)} files")
    _print(
        "files of at most 60 lines with one importer",
        [f"{p} ({n}) < {by}" for p, n, by in short_with_one_importer(modules)],
    )
    folders = Counter(str(PurePosixPath(module.path).parent) for module in modules if module.stem != "__init__")
    _print("folders", [f"{size:>3} {folder}" for folder, size in folders.most_common()])
    _print(f"declarations of {field}", list(declarations(modules, field)))
    users = list(http_users(modules))
    _print(
        f"imports of HTTP libraries ({len({library for library, _, _ in users})} libraries, "
        f"{sum(clients for *_, clients in users)} clients made)",
        [f"{library:<15} {path} ({clients})" for library, path, clients in users],
    )
    _print(
        "public class names twice", [f"{name}: {', '.join(paths)}" for name, paths in classes_twice(modules).items()]
    )


def _print(title: str, lines: list[str]) -> None:
    print(f"\n{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n")


def _print_request() -> None:
    from tests.architecture.traced_request import files_of_a_request  # imported here because it needs torch

    _print("files that a chat request runs through", files_of_a_request())


if __name__ == "__main__":
    if sys.argv[1:] == ["request"]:
        _print_request()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "slots")
