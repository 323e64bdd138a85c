"""A disk that fills up: a tmpfs of the test, in a mount namespace that ends with the process.

The process that the prefix `command(place)` starts has such a disk at `place`, and calls `fill` and `free`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_BALLAST = "ballast"


def command(place: Path, *, size: str) -> list[str]:
    """Return a command prefix that mounts a new private tmpfs at `place`."""
    private = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return [*private, "sh", "-c", mount, str(place)]


def why_not(place: Path) -> str:
    """Return the reason why this machine cannot make such a disk, empty if it can."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        tried = subprocess.run([*command(place, size="64k"), "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def fill(place: Path) -> None:
    with (place / _BALLAST).open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def free(place: Path) -> None:
    (place / _BALLAST).unlink()
