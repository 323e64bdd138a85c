"""reasoning-gym's tasks, each without the others: its package imports a hundred, and sympy and matplotlib with them.

That takes seconds in every process that makes or judges a problem; the module of one task takes a twentieth of that.
Promises: what the library's own `create_dataset` makes or refuses, this does; and whoever imports the library finds it
as if nobody had been here.
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

#: The library's modules that are imported here, among them packages that were not executed, by name.
_apart: dict[str, ModuleType] = {}
#: Imports change what all threads see.
_importing = Lock()


def create_dataset(task: str, **configuration: Any) -> Any:
    """The library's dataset of `task`; `configuration` are the fields of the task's configuration class.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError, TypeError, AssertionError: the library refuses the task or its configuration.
    """
    with _importing:
        if _LIBRARY not in sys.modules and (module := _module_of(task)):
            # A module that needs more of its package than a stand-in has fails to be imported: then the whole does it.
            with suppress(ImportError), _stand_ins(module.rpartition(".")[0]):
                importlib.import_module(module)
                factory = sys.modules[f"{_LIBRARY}.factory"]
                if task in factory.DATASETS:
                    return factory.create_dataset(task, **configuration)
        return importlib.import_module(_LIBRARY).create_dataset(task, **configuration)


def _module_of(task: str) -> str | None:
    """The one module of the library that is called as the task is."""
    library = importlib.util.find_spec(_LIBRARY)
    folders = library.submodule_search_locations if library else None
    found = [path for folder in folders or () for path in Path(folder).glob("*/*.py") if path.stem == task]
    return f"{_LIBRARY}.{found[0].parent.name}.{task}" if len(found) == 1 else None


@contextmanager
def _stand_ins(family: str) -> Iterator[None]:
    """Within, the library and its package `family` are empty and know only where their parts lie; after it, not there.

    A package's own file, which imports all of its tasks, is so left out.
    """
    sys.modules.update(_apart)
    try:
        for name in (_LIBRARY, family):
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                sys.modules[name] = importlib.util.module_from_spec(spec)  # and not executed
        yield
    finally:
        for name in [name for name in sys.modules if name == _LIBRARY or name.startswith(f"{_LIBRARY}.")]:
            _apart[name] = sys.modules.pop(name)
