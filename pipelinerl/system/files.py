"""Files that a crash does not undo, files that nobody else may read, and what the system says of files, in words."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pipelinerl.errors import UserError


def system_words(error: OSError) -> str:
    """What the system refused, and of which file, without its number: `runs/x/recipe.toml: Permission denied`."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


def working_directory() -> Path:
    """The directory that relative paths are meant from. Raises UserError: it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory is not there any more; change to one that is") from None


def from_home(path: str | Path) -> Path:
    """The path, with `~` or `~somebody` written out. Raises UserError: nobody says where that home is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: no home directory is known for {Path(path).parts[0]}; write the path out") from None


def sync(path: Path) -> None:
    """Force a file, or a directory with the names in it, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private(path: Path, text: str) -> bool:
    """As `write_private`, unless there is such a file; returns whether there was none. Of several at once one wins."""
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
    """Write a file that its owner alone may read, whole or not at all, in place of what was there. Raises OSError."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:  # no room: what is half written takes none
        draft.unlink(missing_ok=True)
        raise
