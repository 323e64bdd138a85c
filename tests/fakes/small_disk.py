"""A disk that fills up: a tmpfs of the test's own, in a mount namespace that ends with the process.

`command(place)` is what to put before a command so that `place` is such a disk for it; `fill` and `free` are what that
process does then. Where nothing may be mounted `why_not` says so.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_BALLAST = "ballast"


def command(place: Path, *, size: str) -> list[str]:
    """Words that run the words after them with a new tmpfs at `place`, which others do not see."""
    private = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return [*private, "sh", "-c", mount, str(place)]


def why_not(place: Path) -> str:
    """Why there can be no such disk here; empty when there can."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        tried = subprocess.run([*command(place, size="64k"), "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def fill(place: Path) -> None:
    """Leave no room at all."""
    with (place / _BALLAST).open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def free(place: Path) -> None:
    """Make room again."""
    (place / _BALLAST).unlink()
