"""A tracker whose event files lie on a disk that is full until the tracker has failed.

python -m tests.fakes.track_on_small_disk RUN       RUN/disk is a small disk; prints one JSON object
"""

import json
import logging
import sys
import threading
from pathlib import Path

from pipelinerl.plugins.trackers.role import feed_until
from pipelinerl.plugins.trackers.tracker import TensorBoardTracker
from tests.fakes.small_disk import fill, free
from tests.plugins.trackers.event_files import series


def main(run_dir):
    """Fill the disk, free it once a tracker has failed, and print the final event files as JSON."""
    disk, board, stop = run_dir / "disk", run_dir / "disk" / "board", threading.Event()
    board.mkdir()
    fill(disk)
    failed = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record):
            if "No space left" in record.getMessage() and not failed.is_set():
                failed.set()
                free(disk)
                stop.set()  # when stopped, the next attempt still forwards the remaining events, and ends

    logging.getLogger("pipelinerl").addHandler(Watch())
    while not failed.is_set():
        feed_until(run_dir, "t", lambda bookmark: TensorBoardTracker(board, bookmark), stop)
    stop.clear()
    done = threading.Event()
    done.set()
    feed_until(run_dir, "t", lambda bookmark: TensorBoardTracker(board, bookmark), done)
    print(json.dumps({"failed": failed.is_set(), "rewards": series(board, "reward")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
