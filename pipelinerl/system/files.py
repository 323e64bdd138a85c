"""Functions that write files crash-safely and privately, and that turn file errors into readable messages."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pipelinerl.errors import UserError, reason_of


def system_words(error: OSError) -> str:
    """Describe the error by the file's name and the system's reason: `runs/x/recipe.toml: Permission denied`."""
    reason = error.strerror or reason_of(error)
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


def working_directory() -> Path:
    """Return the working directory. Raises `UserError` if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory no longer exists; change to another one") from None


def from_home(path: str | Path) -> Path:
    """Return the path with `~` or `~user` expanded. Raises `UserError` if the home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: no home directory is known for {Path(path).parts[0]}; give the full path") from None


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private(path: Path, text: str) -> bool:
    """Write like `write_private`, unless the file exists; return True if this process wrote it, as only one does."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    write_private(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically replacing any previous one. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
