"""Examples of users' group filters that keep, reject, fail and hang; tests load them by this file's path."""

from __future__ import annotations

import os
import time

import numpy as np

from pipelinerl.types import Outcome, Problem, Verdict


def asks_for_all(problem, domain, prompt, answer, ground_truth, metadata, tags, rewards, correct, verdicts,
                 completions, lengths, finish_reasons, token_ids, own=3):  # fmt: skip
    assert isinstance(problem, Problem) and isinstance(verdicts[0], Verdict)
    assert verdicts[2].outcome is Outcome.VERIFIER_ERROR
    assert (domain, prompt[0]["content"], answer, ground_truth, metadata, tags) == (
        "d", "?", "right", "right", {"level": 3}, ["t=1"],
    )  # fmt: skip
    assert (rewards, correct, lengths) == ([1.0, 0.0, None], [True, False, False], [2, 3, 1])
    assert (completions, finish_reasons) == (["right", "no", "?"], ["stop", "length", "stop"])
    assert token_ids == [[5, 6], [7, 8, 9], [4]] and own == 3
    return True


def lengths_alone(lengths):
    return max(lengths) < 3 or f"one of {max(lengths)}\n tokens"


def everything(**values):
    return "token_ids" in values


def whatever(metadata):
    """Keep the group, reject it, fail or hang, as the problem's metadata says."""
    match metadata["do"]:
        case "raise":
            return {}["nothing"]
        case "hang":
            time.sleep(60)
        case "die":
            os._exit(1)
    values = {"false": False, "numpy": np.bool_(True), "none": None, "empty": "", "number": 1, "long": "x" * 10_000}
    return values.get(metadata["do"], True)


def asks_too_much(rewards, weather):
    return True


async def asynchronous(rewards):
    return True
