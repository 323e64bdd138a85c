"""A process that forks children; each child saves checkpoints and copies of them until it is killed.

    python -m tests.fakes.saving_process DIRECTORY       a line on stdin: fork, and answer with the child's pid;
                                                         another line: the child has been killed, collect it

A test kills hundreds of children; forking saves each of them a second of imports.
"""

import os
import sys
from pathlib import Path

from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.copies import CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention
from tests.fakes.checkpoints import model_directory, save

#: Bytes added to the trainer state, so that writing takes long enough to be interrupted.
PADDING = 2**18


def store_in(directory):
    """Return the checkpoint store of a run in `directory`, and the store of its copies in `directory/location`."""
    (directory / "recipe.toml").touch()
    copies = CheckpointCopies(
        f"file://{directory}/location", retention=Retention(2), run_files=(directory / "recipe.toml",)
    )
    store = CheckpointStore(directory / "checkpoints", keep=2, model_directory=directory / "model", copies=copies)
    return store, copies


def save_on(directory):
    """Save one checkpoint after another, without end, beginning after the newest one in the directory."""
    store, _ = store_in(directory)
    found = store.latest()
    version = found[1].model_version if found else 0
    while True:
        version += 1
        store.copy(save(store, version, padding=PADDING))


def main():
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
