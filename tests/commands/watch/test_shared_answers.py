"""One answer for all who ask within a second, which says when more has happened since it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelinerl.commands.watch.shared_answers import SharedAnswers
from pipelinerl.commands.watch.watched_run import WatchedRun


def test_it_is_made_once_a_second_and_says_when_it_is_behind(tmp_path: Path) -> None:
    now, made = [0.0], list[int]()
    shared, run = SharedAnswers(clock=lambda: now[0]), WatchedRun(0, tmp_path)

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"made": made[-1]}

    def asked(question: str = "steps") -> Any:
        return json.loads(bytes(shared.of(question, run, make).body))

    assert asked() == asked() == {"behind": False, "made": 0}
    run.feed.put("step", {"step": 1}, step=1)
    assert asked() == {"behind": True, "made": 0}
    assert asked("now") == {"behind": False, "made": 1}, "another question has an answer of its own"
    now[0] = 1.0
    assert asked() == {"behind": False, "made": 2}


def test_no_more_answers_are_kept_than_stated(tmp_path: Path) -> None:
    shared, run = SharedAnswers(clock=lambda: 0.0), WatchedRun(0, tmp_path)
    for question in range(100):
        shared.of(question, run, dict)
    assert len(shared._kept) <= 32
