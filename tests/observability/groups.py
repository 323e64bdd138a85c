"""Builders of sample groups for tests."""

from __future__ import annotations

from typing import Any

from pipelinerl.observability.samples import AnswerRecord, SampleGroup, SampleKind

#: Hostile model output: markup, cursor movement, reversed text, a NUL, a lone surrogate.
HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\u202edrow\u2069\x00\u200b\ud800 & \"'</dd></details>"


def answer(text: str = "an answer", *, reward: float | None = 1.0, **fields: Any) -> AnswerRecord:
    outcome = "timeout" if reward is None else "correct" if reward > 0 else "wrong"
    given = {"outcome": outcome, "length": 3, "finish_reason": "stop", "spans": ((7, 2), (8, 1)), "staleness": 2}
    return AnswerRecord(text=text, reward=reward, **given | fields)


def group(step: int = 1, *answers: AnswerRecord, **fields: Any) -> SampleGroup:
    given: dict[str, Any] = {
        "kind": SampleKind.TRAINED,
        "time": float(step),
        "group_id": f"prompt-{step:06d}",
        "domain": "words",
        "problem_id": f"words-{step}",
        "prompt": "<|im_start|>user\nsay it",
    }
    return SampleGroup(step=step, answers=answers or (answer(),), **given | fields)
