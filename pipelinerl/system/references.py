"""Loads user code by reference, `package.module:attribute` or `path.py:attribute`, in the process that uses it.

A file is loaded once per process, under a private module name derived from its path, so files of the same name do not
collide. During the import its folder is first on `sys.path`, as for a script, and afterwards last, for imports inside
functions. The processes of a run start with `python -P`, so no file in the current directory replaces a library. A
module that a reference names may still be there: the directory is added last.

Errors in user code are reported as one sentence with file and line, without a traceback.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pipelinerl.errors import RecipeError, ReferenceFailed, UserError
from pipelinerl.system.files import from_home

_IN_A_FILE: Final = re.compile(r"(?P<path>[^\n]*\.py):(?P<attribute>[A-Za-z_]\w*)")
_IN_A_MODULE: Final = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_]\w*)")
_PRIVATE: Final = "pipelinerl_user_"
#: Maximum length of an exception's description.
_LONGEST_LINE: Final = 1000


def is_reference(text: str) -> bool:
    """Return True if the text has the form `package.module:attribute` or `path.py:attribute`."""
    return bool(_IN_A_FILE.fullmatch(text) or _IN_A_MODULE.fullmatch(text))


def anchored(text: str, folder: Path) -> str:
    """Return the reference with its file path, relative to `folder`, made absolute; module references are unchanged."""
    match = _IN_A_FILE.fullmatch(text)
    return f"{(folder / from_home(match['path'])).resolve()}:{match['attribute']}" if match else text


def load_reference(text: str) -> Any:
    """Return the object that a reference names. Raises `ReferenceFailed` if the object cannot be loaded."""
    if match := _IN_A_FILE.fullmatch(text):
        module = _from_file(from_home(match["path"]).resolve())
    elif match := _IN_A_MODULE.fullmatch(text):
        module = _from_name(match["module"], text)
    else:
        raise ReferenceFailed(f"expected package.module:attribute or path.py:attribute, got {text!r}")
    try:
        return getattr(module, match["attribute"])
    except AttributeError:
        place = module.__file__ or module.__name__
        raise ReferenceFailed(f"{place} has no {match['attribute']!r}{_what_it_has(module)}") from None


#: Exceptions of user code. Ctrl-C while user code runs counts as its error, since the two cannot be told apart.
_ANYTHING: Final = (Exception, SystemExit, KeyboardInterrupt)


@contextmanager
def users_errors(where: str, thing: Any) -> Iterator[None]:
    """Turn what user code raises in the block into a `RecipeError` that names the key `where`, file and line."""
    try:
        yield
    except UserError:
        raise
    except _ANYTHING as error:
        raise RecipeError(f"{where}: {last_line(error, position_of(thing))}") from None


def place_of(thing: Any) -> str:
    """Return `name, file:line` of a function or class; its `repr` if these are unknown."""
    thing = inspect.unwrap(thing)
    try:
        return f"{thing.__name__}, {inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError, AttributeError):
        return repr(thing)


def position_of(thing: Any) -> str:
    """Return `file:line: name` of a function or class of user code; its name alone if the file is unknown."""
    name = str(getattr(thing, "__name__", type(thing).__name__))
    try:
        thing = inspect.unwrap(thing)
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}: {name}"
    except (OSError, TypeError, ValueError):
        return name


def last_line(error: BaseException, place: str = "") -> str:
    """Return an exception's class and message, after the file and line of the innermost frame of user code.

    Without such a frame, `place` comes first. The text is one line of at most `_LONGEST_LINE` characters without lone
    surrogates. Never raises, even if the exception's own methods do.
    """
    try:
        text = "".join(traceback.format_exception_only(error)).strip().rpartition("\n")[2]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{error.filename}:{error.lineno}"
        elif frames:
            place = f"{frames[-1].filename}:{frames[-1].lineno}"
    except BaseException:  # methods of a user's exception may raise anything
        text = f"{type(error).__name__}, whose message cannot be read"
    text = f"{place}: {text}" if place else text
    return " ".join(text[:_LONGEST_LINE].encode("utf-8", "replace").decode().splitlines())


def _is_users(filename: str) -> bool:
    own = str(Path(__file__).parents[1])
    return not filename.startswith(("<", own)) and f"python{sys.version_info.major}" not in filename


def _from_file(path: Path) -> ModuleType:
    name = f"{_PRIVATE}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ReferenceFailed(f"{path} does not exist; its path is relative to the recipe that names it")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ReferenceFailed(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except _ANYTHING as error:
        del sys.modules[name]
        raise ReferenceFailed(f"{path} cannot be imported: {last_line(error)}") from None
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def _from_name(name: str, text: str) -> ModuleType:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ReferenceFailed(f"{text!r} cannot be imported: {last_line(error)}") from None
        raise ReferenceFailed(f"expected module:attribute of an installed module, got {text!r}") from None
    except _ANYTHING as error:
        raise ReferenceFailed(f"{text!r} cannot be imported: {last_line(error)}") from None


def _what_it_has(module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    named = ", ".join(sorted(name for name in own if not name.startswith("_")))
    return f"; it has {named}" if named else ""
