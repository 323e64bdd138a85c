"""Directives of the controller to the trainer."""

from typing import Any

from pipelinerl.messages import Directive, TrainerKnobs


def directive(answers: str = "x", **changes: Any) -> Directive:
    """Return a directive that asks for nothing but the steps, except for `changes`."""
    given: dict[str, Any] = {
        "epoch": 1,
        "knobs": TrainerKnobs(k=1, learning_rate=0.1, rollouts_per_step=1),
        "publish_to": [],
        "membership": 0,
        "failed": [],
        "checkpoint": False,
        "stop": False,
    }
    return Directive(answers=answers, **given | changes)
