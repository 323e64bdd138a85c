"""Start and end of a process: rare garbage collection while it loads; an exit that works with busy daemon threads."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_USUAL = gc.get_threshold()
#: Number of new objects that triggers a garbage collection while a process loads; Python's default is hundreds.
_WHILE_LOADING = 50_000


def collect_rarely() -> None:
    """Collect garbage rarely while a process starts; a command that serves no requests may keep this setting.

    Imported objects are never garbage, but Python searches them repeatedly while their number grows. This search takes
    an eighth of the CPU time that a process with torch and transformers needs to start.
    """
    gc.set_threshold(_WHILE_LOADING)


def collect_as_usual() -> None:
    """Restore the frequency at which Python normally collects garbage."""
    gc.set_threshold(*_USUAL)


def run_process(main: Callable[[], None]) -> None:
    """Run `main`, then end the process with status 0 or `SystemExit`'s, even if daemon threads are busy.

    Exceptions other than `SystemExit` are raised. In a normal exit, CPython ends a daemon thread when it returns from
    native code to the interpreter. If C++ frames are on its stack, this aborts the process: an engine that was stopped
    while it read weights ended with SIGABRT. As in a normal exit, other threads are waited for, `atexit` functions are
    called, and output is flushed.
    """
    try:
        main()
        status = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # the status is a message, which the interpreter prints
            raise
        status = ended.code
    if any(thread.daemon for thread in threading.enumerate()):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the other threads, as the interpreter does
        atexit._run_exitfuncs()
        with suppress(OSError):  # the reader of the output may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
