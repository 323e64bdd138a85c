"""Exports of a live, finished or crashed run: `pipelinerl trace` for Perfetto, `pipelinerl track` for TensorBoard.

A trace is written to a draft file while the events are read, and renamed once complete. TensorBoard is fed by the same
code that feeds a run's trackers.
"""

from __future__ import annotations

import gzip
import hashlib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Final

from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventFollower
from pipelinerl.observability.timeline.chrome_trace import ChromeTrace, write_trace
from pipelinerl.observability.trackers.tracker import TrackerFeed, missing_package

#: Name of the trace file in the run's directory, unless the user gives another path.
DEFAULT_NAME: Final = "trace.json.gz"


def trace_run(run_dir: Path, output: Path | None) -> str:
    """Write the trace to `output`, and return a message for the user.

    Raises:
        UserError: there is no run, its log is damaged, or the file cannot be written.
    """
    log, path = run_dir / "events.jsonl", output or run_dir / DEFAULT_NAME
    if not log.is_file():
        raise UserError(f"{run_dir} is not a run: it has no events.jsonl")
    draft, trace = path.with_name(f"{path.name}.part"), ChromeTrace()
    try:
        with _opened(draft) as file:
            count = write_trace(trace, EventFollower(log).all(), file, run=run_dir.resolve().name)
        draft.replace(path)
    except ValueError as error:
        raise UserError(f"{error}; remove that line to continue") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
    left_out = f"; {trace.left_out:,} groups found no free row" if trace.left_out else ""
    return f"{path}: {count:,} trace events{left_out}; open it at https://ui.perfetto.dev"


def _opened(path: Path) -> IO[str]:
    if path.name.endswith(".gz.part"):
        return gzip.open(path, "wt", compresslevel=6, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def track_run(run_dir: Path, directory: Path) -> str:
    """Write the events since the last call to TensorBoard files in `directory`, and return a message for the user.

    Raises:
        UserError: there is no run, tensorboardX is missing, or something cannot be read or written.
    """
    from pipelinerl.roles.tracker_role import open_tensorboard  # imports the libraries of a role

    if not (run_dir / "events.jsonl").is_file():
        raise UserError(f"{run_dir} is not a run: it has no events.jsonl")
    if sentence := missing_package("tensorboard"):
        raise UserError(sentence)
    pieces, place = 0, directory.resolve()
    name = f"tensorboard-{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    try:
        with closing(TrackerFeed(run_dir, name, partial(open_tensorboard, place))) as feed:
            while feed.advance():
                pieces += 1
            over = feed.is_over
    except BlockingIOError as error:
        raise UserError(f"{error}; wait until it has ended") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from None
    new = "" if pieces else "nothing new for "
    going = "" if over else "; the run is not over: repeat the command for later steps"
    return f"{new}{directory}; view it with: tensorboard --logdir {directory}{going}"
