"""A replacement of reasoning-gym's `create_dataset` that imports only the module of the requested task.

The library's own function imports a hundred tasks, with sympy and matplotlib. That takes seconds in every process that
makes or judges a problem, twenty times as long as one task's module. Results and errors are the same, and a later
import of the library is unaffected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, Final

_LIBRARY: Final = "reasoning_gym"

#: Modules of the library that `create_dataset` imported, including packages without code (`_stand_ins`). Between calls,
#: they are not in `sys.modules`.
_apart: dict[str, ModuleType] = {}
#: Lock that is held while `create_dataset` imports, since `sys.modules` changes for all threads.
_importing = Lock()


def create_dataset(task: str, **configuration: Any) -> Any:
    """Return the library's dataset of `task`. Raises `ModuleNotFoundError` if the library is not installed.

    Raises `ValueError`, `TypeError` or `AssertionError` if the library rejects the task or its configuration.
    """
    with _importing:
        if _LIBRARY not in sys.modules and (module := _module_of(task)):
            # A module that needs the code of its package fails to import; then the whole library is imported instead.
            with suppress(ImportError), _stand_ins(module.rpartition(".")[0]):
                importlib.import_module(module)
                factory = sys.modules[f"{_LIBRARY}.factory"]
                if task in factory.DATASETS:
                    return factory.create_dataset(task, **configuration)
        return importlib.import_module(_LIBRARY).create_dataset(task, **configuration)


def _module_of(task: str) -> str | None:
    library = importlib.util.find_spec(_LIBRARY)
    folders = library.submodule_search_locations if library else None
    found = [path for folder in folders or () for path in Path(folder).glob("*/*.py") if path.stem == task]
    return f"{_LIBRARY}.{found[0].parent.name}.{task}" if len(found) == 1 else None


@contextmanager
def _stand_ins(family: str) -> Iterator[None]:
    """Temporarily replace the library and its package `family`, which import all tasks, by packages without code."""
    sys.modules.update(_apart)
    try:
        for name in (_LIBRARY, family):
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                sys.modules[name] = importlib.util.module_from_spec(spec)
        yield
    finally:
        for name in [name for name in sys.modules if name == _LIBRARY or name.startswith(f"{_LIBRARY}.")]:
            _apart[name] = sys.modules.pop(name)
