"""`run_process`: the main function of a process that may end while its daemon threads are busy.

At exit, CPython ends a daemon thread when the thread returns from native code to the interpreter. If C++ frames are on
its stack, this aborts the process ("terminate called without an active exception"): an engine that was stopped while it
read weights ended with SIGABRT, an unexpected status. With `run_process`, a process ends with the status of its main
function, no matter what its daemon threads do. Other threads are waited for, `atexit` functions are called, and output
is flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


def run_process(main: Callable[[], None]) -> None:
    """Run `main` and end the process, unless `main` raises an exception other than `SystemExit`, which is passed on."""
    try:
        main()
        status = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # the code is a message, which the interpreter prints
            raise
        status = ended.code
    if any(thread.daemon for thread in threading.enumerate()):
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter begins its end: others are waited for
        atexit._run_exitfuncs()  # private to CPython; the rest of the exit is skipped
        with suppress(OSError):  # the reader of the output may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
