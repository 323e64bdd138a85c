"""`pipelinerl trace`: a run as a file that Perfetto opens, of any run: live, over, crashed.

The file is written as the events are read, beside its place, and put there when it is whole.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, Final

from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventFollower
from pipelinerl.observability.timeline.chrome_trace import ChromeTrace, write_trace

#: The name of the file in the run's directory, where no other is asked for.
DEFAULT_NAME: Final = "trace.json.gz"


def trace_run(run_dir: Path, output: Path | None) -> str:
    """Write the trace; returns a sentence on what was written.

    Raises:
        UserError: there is no run, its log is damaged, or the file cannot be written.
    """
    log, path = run_dir / "events.jsonl", output or run_dir / DEFAULT_NAME
    if not log.is_file():
        raise UserError(f"{run_dir} is no run: it has no events.jsonl")
    draft, trace = path.with_name(f"{path.name}.part"), ChromeTrace()
    try:
        with _opened(draft) as file:
            count = write_trace(trace, EventFollower(log).all(), file, run=run_dir.resolve().name)
        draft.replace(path)
    except ValueError as error:
        raise UserError(f"{error}; remove that line to go on") from None
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
