"""Files that a crash does not undo, and files that nobody else may read."""

from __future__ import annotations

import os
import threading
from pathlib import Path


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
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
