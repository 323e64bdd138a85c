"""A tracker receives each metric value once, even if its process is killed or the run resumes from a checkpoint."""

import errno
import json
from contextlib import closing
from typing import final

import pytest

from pipelinerl.plugins.trackers.tracker import TensorBoardTracker, TrackerFeed
from tests.plugins.trackers.event_files import points, series
from tests.plugins.watch.timeline.events_of_a_run import event, run, step


def _leave(run_dir, events):
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)


def _feed(run_dir):
    return TrackerFeed(run_dir, "tensorboard", lambda bookmark: TensorBoardTracker(run_dir / "tb", bookmark))


def _fed(run_dir):
    with closing(_feed(run_dir)) as feed:
        while feed.advance():
            pass
        return feed.is_over


def _steps(first, last, *, reward=0.5):
    return [step(number, number) | {"reward": reward} for number in range(first, last + 1)]


def test_tensorboard_files_contain_every_metric_value_once(tmp_path):
    _leave(tmp_path, run(5))
    assert _fed(tmp_path)
    assert series(tmp_path / "tb", "reward") == [(number, 0.5) for number in range(1, 6)]
    assert series(tmp_path / "tb", "eval/held_out/accuracy") == [(0, 0.25)]
    assert series(tmp_path / "tb", "perf/update_pause_s")[-1] == (5, 0.001)
    assert set(points(tmp_path / "tb").values()) == {1}


def test_metric_rows_logged_before_a_kill_are_not_duplicated(tmp_path):
    """A kill before the position was saved is simulated by restoring an earlier position, from two different times."""
    _leave(tmp_path, _steps(1, 3))
    _fed(tmp_path)
    place = tmp_path / "trackers" / "tensorboard.json"
    before = place.read_bytes()
    _leave(tmp_path, _steps(4, 5))
    with closing(_feed(tmp_path)) as feed:
        feed.advance()
        _leave(tmp_path, _steps(6, 7))
        in_the_middle = place.read_bytes()
        feed.advance()
    place.write_bytes(in_the_middle)  # as if the tracker was killed before it saved its last position
    _fed(tmp_path)
    place.write_bytes(before)
    _fed(tmp_path)
    assert series(tmp_path / "tb", "reward") == [(number, 0.5) for number in range(1, 8)]


def test_repeated_steps_replace_earlier_values_in_the_tracker(tmp_path):
    again = event("trainer_ready", 8.0, epoch=2, model_version=4)
    _leave(tmp_path, _steps(1, 4, reward=0.25))
    _fed(tmp_path)
    _leave(tmp_path, _steps(5, 7, reward=0.25))
    _fed(tmp_path)
    _leave(tmp_path, [again, *_steps(5, 6, reward=0.75)])
    _fed(tmp_path)
    _leave(tmp_path, [event("trainer_ready", 9.0, epoch=3, model_version=6), *_steps(7, 8, reward=1.0)])
    _fed(tmp_path)
    assert series(tmp_path / "tb", "reward") == [
        *((number, 0.25) for number in range(1, 5)), (5, 0.75), (6, 0.75), (7, 1.0), (8, 1.0),
    ]  # fmt: skip


def test_tracker_killed_between_discarding_steps_and_saving_its_position_discards_them_again(tmp_path):
    _leave(tmp_path, _steps(1, 5, reward=0.25))
    _fed(tmp_path)
    place = tmp_path / "trackers" / "tensorboard.json"
    before = place.read_bytes()
    _leave(tmp_path, [event("trainer_ready", 8.0, epoch=2, model_version=2), *_steps(3, 5, reward=0.75)])
    _fed(tmp_path)
    place.write_bytes(before)
    _fed(tmp_path)
    assert series(tmp_path / "tb", "reward") == [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75), (5, 0.75)]


def test_second_process_that_sends_metrics_to_the_same_tracker_is_rejected(tmp_path):
    _leave(tmp_path, _steps(1, 2))
    with closing(_feed(tmp_path)), pytest.raises(BlockingIOError, match="another process feeds tensorboard"):
        _feed(tmp_path)
    _fed(tmp_path)


def test_damaged_file_with_a_trackers_position_is_rejected(tmp_path):
    _leave(tmp_path, _steps(1, 2))
    _fed(tmp_path)
    (tmp_path / "trackers" / "tensorboard.json").write_text("{")
    with pytest.raises(ValueError, match=r"must hold the tracker's position: .* remove it to start over"):
        _feed(tmp_path)


@final
class Failing:
    """A tracker whose disk is full at first; when it is reopened at a bookmark, it keeps only the flushed steps."""

    def __init__(self, kept, failures, bookmark):
        self.kept, self._failures, self._new = kept, failures, list[int]()
        del kept[int((bookmark or {}).get("kept", 0)) :]

    def _point(self, name):
        if self._failures and self._failures[0] == name:
            self._failures.pop(0)
            raise OSError(errno.ENOSPC, "No space left on device")

    def log(self, step, figures, *, time):
        self._point("log")
        self.kept.append(step)

    def rewind(self, step):
        self._point("rewind")

    def flush(self):
        self._point("flush")
        return {"kept": len(self.kept)}

    def close(self):
        self._point("close")


@pytest.mark.parametrize("failures", [["log"], ["flush"], ["log", "flush", "log"], ["flush", "close"]])
def test_tracker_receives_every_step_once_even_if_calls_to_it_fail(tmp_path, failures):
    _leave(tmp_path, _steps(1, 4))
    kept = []
    tries = len(failures)
    for _ in range(tries + 1):
        try:
            with closing(TrackerFeed(tmp_path, "t", lambda bookmark: Failing(kept, failures, bookmark))) as feed:
                while feed.advance():
                    pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert kept == [1, 2, 3, 4] and failures == []
