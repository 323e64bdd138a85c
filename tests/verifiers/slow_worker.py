"""A worker function for tests of the worker pool: it sleeps, uses CPU time, dies, or reports its process id."""

import os
import threading
import time


def open_sleeper(argument):
    if argument == "broken":
        raise RuntimeError("cannot be opened")
    if argument == "threads":  # then the pool may not fork this process, since a process with threads cannot be forked
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def answering(question):
        match question:
            case ["sleep", seconds]:
                time.sleep(seconds)
            case ["spin", seconds]:
                until = time.process_time() + seconds  # the same CPU time on a busy machine
                while time.process_time() < until:
                    pass
            case ["long", size]:
                return "x" * size
            case "die":
                os._exit(1)
        return [os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)]

    return answering
