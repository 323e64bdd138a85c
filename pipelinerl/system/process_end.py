"""`run_process`: the main function of a process that may end while its threads are at work.

CPython ends a daemon thread as it comes back from native code to an interpreter that is going away, in the middle of
the frames that called it. In C++ these abort the process ("terminate called without an active exception"): an engine
that was told to stop while it read its weights ended with SIGABRT, which is no status of a role's. Promises that a
process ends with the status that its main function gives, whatever its daemon threads are doing; the other threads are
waited for, what is registered with `atexit` is called, and what was printed is written.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


def run_process(main: Callable[[], None]) -> None:
    """Run `main` and end the process, unless an exception but `SystemExit` does."""
    try:
        main()
        status = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # a sentence, which the interpreter prints
            raise
        status = ended.code
    if any(thread.daemon for thread in threading.enumerate()):
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter begins its end: others are waited for
        atexit._run_exitfuncs()  # and what comes after is left out
        with suppress(OSError):  # nobody reads it any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
