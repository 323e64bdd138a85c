"""The sample log has a size limit, never blocks, is intact after a kill, and drops samples if its disk is unusable."""

import threading
import time

from pipelinerl.observability.samples import SampleLog, read_samples
from tests.observability.samples.groups import answer, group
from tests.patience import PATIENCE_S, SOON_S

MAX_BYTES = 64 * 1024


def written(path):
    return sum(file.stat().st_size for file in (path / "samples").glob("*"))


def log_in(path, *, max_bytes=MAX_BYTES):
    return SampleLog(path / "samples", "training", max_bytes=max_bytes)


def test_samples_put_into_the_log_can_be_read(tmp_path):
    log = log_in(tmp_path)
    for step in (1, 2, 3):
        log.put(lambda step=step: [group(step)])
    log.close()
    assert [each.step for each in read_samples(tmp_path)] == [1, 2, 3] and log.left_out == 0


def test_sample_log_stays_within_its_size_limit_and_keeps_the_newest_samples(tmp_path):
    sizes, last = [], 0
    for life in range(3):  # three writers, one after another, each of which starts a new file
        log = log_in(tmp_path)

        def make(step):
            sizes.append(written(tmp_path))
            return [group(step, answer("x" * 1500), answer("y" * 500))]

        for step in range(last + 1, last + 101):
            log.put(lambda step=step: make(step))
        log.close()
        last = 100 * (life + 1)
    assert log.left_out == 0
    assert max(*sizes, written(tmp_path)) <= MAX_BYTES and written(tmp_path) > MAX_BYTES // 2
    steps = [each.step for each in read_samples(tmp_path)]
    assert steps == list(range(301 - len(steps), 301)), "the newest samples are kept, without a gap"


def test_oversized_sample_group_is_dropped_and_the_next_group_is_kept(tmp_path):
    log = log_in(tmp_path)
    log.put(lambda: [group(1, *(answer() for _ in range(500))), group(2)])
    log.close()
    assert [each.step for each in read_samples(tmp_path)] == [2] and log.left_out == 1


def test_putting_a_sample_into_the_log_does_not_wait_for_a_slow_writer(tmp_path):
    log, gate = log_in(tmp_path, max_bytes=2**22), threading.Event()

    def slow():
        assert gate.wait(PATIENCE_S)
        return []

    began = time.monotonic()
    log.put(slow)
    for step in range(1000):
        log.put(lambda step=step: [group(step)])
    assert time.monotonic() - began < SOON_S
    gate.set()
    log.close()
    assert 0 < log.left_out < 1000 and log.left_out + len(read_samples(tmp_path)) == 1000


def test_incomplete_last_line_of_the_sample_log_is_skipped_by_readers_and_not_continued_by_writers(tmp_path):
    first = log_in(tmp_path)
    first.put(lambda: [group(1)])
    first.close()
    (torn,) = (tmp_path / "samples").glob("*")
    with torn.open("ab") as file:
        file.write(b'{"kind":"trained","st')
    second = log_in(tmp_path)
    second.put(lambda: [group(2)])
    second.close()
    assert [each.step for each in read_samples(tmp_path)] == [1, 2]


def test_samples_are_dropped_without_an_error_if_their_directory_is_unusable(tmp_path):
    (tmp_path / "samples").write_text("in the way")
    log = log_in(tmp_path)
    log.put(lambda: [group(1)])
    log.put(lambda: [group(2)])
    log.close()
    assert log.left_out == 2


def test_sample_whose_construction_raises_is_dropped_and_later_samples_are_kept(tmp_path, caplog):
    log = log_in(tmp_path)

    def make():
        raise RuntimeError("the tokenizer is borrowed")

    log.put(make)
    log.put(lambda: [group(2)])
    log.close()
    assert log.left_out == 1 and [each.step for each in read_samples(tmp_path)] == [2]
    assert "RuntimeError: the tokenizer is borrowed" in caplog.text


def test_sample_files_are_readable_by_their_owner_only(tmp_path):
    log = log_in(tmp_path)
    log.put(lambda: [group(1)])
    log.close()
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "samples").glob("*")] == [0o600]
