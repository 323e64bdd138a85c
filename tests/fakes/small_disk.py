"""A small disk that a test can fill: a tmpfs in a mount namespace of its own, which ends with its process.

A process started with the prefix `command(place)` has such a disk at `place`, and may call `fill` and `free`.
"""

import os
import subprocess

_BALLAST = "ballast"


def command(place, *, size):
    """Return a command prefix that mounts a new private tmpfs at `place`."""
    private = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return [*private, "sh", "-c", mount, str(place)]


def why_not(place):
    """Return the reason why this machine cannot mount such a disk, or "" if it can."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        tried = subprocess.run([*command(place, size="64k"), "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def fill(place):
    with (place / _BALLAST).open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def free(place):
    (place / _BALLAST).unlink()
