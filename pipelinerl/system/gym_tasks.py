"""reasoning-gym's tasks, imported one by one: importing the whole package would import a hundred tasks, with sympy and
matplotlib.

The whole import takes seconds in every process that makes or judges a problem; importing one task's module takes a
twentieth of that. The results and errors are the same as those of the library's own `create_dataset`. A later import of
the library is unaffected.
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

#: Modules of the library that were imported here, by name, including packages whose code was not executed.
_apart: dict[str, ModuleType] = {}
#: Held during an import here, which changes `sys.modules` for all threads.
_importing = Lock()


def create_dataset(task: str, **configuration: Any) -> Any:
    """Return the library's dataset of `task`; `configuration` are the fields of its configuration class.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError, TypeError, AssertionError: the library rejects the task or its configuration.
    """
    with _importing:
        if _LIBRARY not in sys.modules and (module := _module_of(task)):
            # A module fails to import if it needs more of its package than an empty stand-in has. In that case import
            # the whole library.
            with suppress(ImportError), _stand_ins(module.rpartition(".")[0]):
                importlib.import_module(module)
                factory = sys.modules[f"{_LIBRARY}.factory"]
                if task in factory.DATASETS:
                    return factory.create_dataset(task, **configuration)
        return importlib.import_module(_LIBRARY).create_dataset(task, **configuration)


def _module_of(task: str) -> str | None:
    """Return the only module of the library that is named like the task; None if there is none, or more than one."""
    library = importlib.util.find_spec(_LIBRARY)
    folders = library.submodule_search_locations if library else None
    found = [path for folder in folders or () for path in Path(folder).glob("*/*.py") if path.stem == task]
    return f"{_LIBRARY}.{found[0].parent.name}.{task}" if len(found) == 1 else None


@contextmanager
def _stand_ins(family: str) -> Iterator[None]:
    """Replace the library and its package `family` by empty packages that only know their search path.

    This skips the file of the package itself, which would import all of its tasks. The stand-ins are removed
    afterwards.
    """
    sys.modules.update(_apart)
    try:
        for name in (_LIBRARY, family):
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                sys.modules[name] = importlib.util.module_from_spec(spec)  # the package's code is not executed
        yield
    finally:
        for name in [name for name in sys.modules if name == _LIBRARY or name.startswith(f"{_LIBRARY}.")]:
            _apart[name] = sys.modules.pop(name)
