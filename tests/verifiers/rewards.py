"""Examples of users' reward functions: correct, odd, failing and hanging ones; tests load them by this file's path."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pipelinerl.types import Outcome, Problem, Verdict


def by_place(task, text):
    assert isinstance(task, Problem)
    return text == task.ground_truth


def strict(completion, answer):
    """Compare as integers if `answer` is one, else by the first character; crash on text without these."""
    if completion == "offline":
        raise ConnectionError("the dictionary is away")
    return float(int(completion.encode("ascii")) == int(answer) if answer.isdigit() else completion[0] == answer[0])


_CALLS = []


def flaky(completion, answer):
    _CALLS.append(completion)
    if completion == "no" and _CALLS.count("no") == 1:
        raise ValueError("only once")
    return completion == answer


def by_name(completion, answer, prompt, metadata, token_ids, finish_reason, tags=(), unknown="own"):
    arguments = (prompt[0]["content"], metadata["level"], token_ids, finish_reason, tags, unknown)
    assert arguments == ("?", 3, [5, 6], "stop", ("t=1",), "own"), arguments
    return 0.5 * (completion == answer)


def of_a_group(completions, answer, **kwargs):
    assert {"prompts", "completion_ids", "metadata"} <= kwargs.keys()
    return [len(text) - min(map(len, completions)) for text in completions]


def too_few(completions, **kwargs):
    return [1.0]


async def asynchronous(problem, completion_text):
    await asyncio.sleep(60 if completion_text == "hang" else 0.001)
    if completion_text == "raise":
        raise KeyError("no such thing")
    return 1.0


async def asynchronous_group(completions):
    return [float(len(text)) for text in completions]


def whatever(completion):
    """Return the value that the completion's text names, or hang."""
    match completion:
        case "hang":
            time.sleep(60)
        case "spin":
            while True:
                pass
    values = {
        "true": True, "one": 1, "float32": np.float32(0.25), "bool_": np.bool_(True),
        "verdict": Verdict(outcome=Outcome.WRONG, reward=0.125, reason="so", answer="a"),
    }  # fmt: skip
    return values.get(completion, 0.0)


class OwnError(BaseException):
    """An exception that is no `Exception`."""


def ends(completion):
    """End this process, or try to, in the way that the completion's text names; `forks` leaves a second process."""
    match completion:
        case "raise":
            raise ConnectionError("away")
        case "print":
            print('{"not": "an answer"}', flush=True)
        case "exit":
            sys.exit(7)
        case "own":
            raise OwnError("mine")
        case "generator":
            raise GeneratorExit
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            return bytearray(1 << 40)
        case "os._exit":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "abort":
            os.abort()
        case "closes":
            os.closerange(3, 256)
        case "forks" if child := os.fork():
            os.waitpid(child, 0)
        case "session":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path(os.environ["CHILD_FILE"]).write_text(str(child.pid))
            time.sleep(600)
    return 1.0


class Judge:
    """A user's verifier class, with the same methods as the package's own verifiers."""

    async def verify(self, problem, completion_text):
        if completion_text == "hang":
            await asyncio.sleep(60)
        if completion_text == "raise":
            raise ValueError("not for me")
        return Verdict(outcome=Outcome.CORRECT, reward=2.0) if completion_text else None


def asks_too_much(weather):
    return 0.0


def by_column(completion, level):
    return float(completion == "right" and level == 3)


def of_a_group_by_column(completions, level, **kwargs):
    assert "level" not in kwargs and set(kwargs) >= {"answer", "metadata"}
    return [float(len(text) == each) for text, each in zip(completions, level, strict=True)]


def by_missing_column(completion, solution):
    return float(completion == solution)
