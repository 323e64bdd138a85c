"""Worker functions for the tests, which sleep, spin, die, or report their process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any


def open_sleeper(argument: str) -> Callable[[Any], Any]:
    if argument == "broken":
        raise RuntimeError("cannot be opened")
    if argument == "threads":  # a process with threads cannot be forked safely
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def answering(question: Any) -> Any:
        match question:
            case ["sleep", seconds]:
                time.sleep(seconds)
            case ["spin", seconds]:
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    pass
            case ["long", size]:
                return "x" * size
            case "die":
                os._exit(1)
        return [os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)]

    return answering
