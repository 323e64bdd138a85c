"""A process that forks children, each of which saves checkpoints and their copies until it is killed.

    python -m tests.fakes.saving_process DIRECTORY       a line on stdin: fork, and answer with the child's pid;
                                                         another line: the child has been killed, collect it

Forking saves each of hundreds of trainers a second of imports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention
from tests.fakes.checkpoints import model_directory, save

#: Enough bytes of trainer state for writing to take time.
PADDING = 2**18


def store_in(directory: Path) -> tuple[CheckpointStore, CheckpointCopies]:
    """Return a run's checkpoints in `directory`, and their copies next to it."""
    (directory / "recipe.toml").touch()
    copies = CheckpointCopies(
        f"file://{directory}/location", retention=Retention(2), run_files=(directory / "recipe.toml",)
    )
    store = CheckpointStore(directory / "checkpoints", keep=2, model_directory=directory / "model", copies=copies)
    return store, copies


def save_on(directory: Path) -> None:
    """Save one checkpoint after another, forever, from the newest in the directory on."""
    store, _ = store_in(directory)
    found = store.latest()
    version = found[1].model_version if found else 0
    while True:
        version += 1
        store.copy(save(store, version, padding=PADDING))


def main() -> None:
    directory = Path(sys.argv[1])
    model_directory(directory / "model")
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            save_on(directory)
        print(child, flush=True)
        sys.stdin.readline()
        os.waitpid(child, 0)
        print("collected", flush=True)


if __name__ == "__main__":
    main()
