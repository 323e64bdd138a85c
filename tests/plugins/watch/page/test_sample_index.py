"""The index of the sample log filters, sorts and pages samples while the log grows, rotates and repeats steps."""

from dataclasses import replace

from pipelinerl.observability.samples import SampleLog
from pipelinerl.plugins.watch.page.sample_index import SampleFilter, SampleIndex
from tests.observability.groups import answer, group
from tests.patience import PATIENCE_S


def kept(run_dir, *groups, max_bytes=2**24):
    log = SampleLog(run_dir / "samples", "training", max_bytes=max_bytes)
    log.put(lambda: groups)
    log.close(timeout_s=PATIENCE_S)


def read(index):
    while index.read() or index.unread_bytes:
        pass
    return index


def steps(index, wanted):
    numbers = []
    for place in index.choose(wanted).places:
        held = index.group(place.name)
        assert held is not None
        numbers.append(held.step)
    return numbers


def test_sample_index_lists_the_newest_samples_first_and_counts_a_repeated_step_once(tmp_path):
    kept(tmp_path, *(group(step) for step in range(1, 6)))
    index = read(SampleIndex(tmp_path))
    assert steps(index, SampleFilter(limit=3)) == [5, 4, 3] and index.count == 5
    again = group(4, answer("again"), time=99.0)
    kept(tmp_path, again)
    read(index)
    assert steps(index, SampleFilter(limit=3)) == [4, 5, 3] and index.count == 5
    name = index.choose(SampleFilter(limit=1)).places[0].name
    indexed, copied = index.group(name), read(SampleIndex(tmp_path)).group(name)
    assert indexed == copied and indexed is not None and indexed.answers[0].text == "again", "a group keeps its name"


def test_samples_dropped_from_the_log_disappear_from_the_index(tmp_path):
    long = tuple(answer("x" * 4000) for _ in range(4))
    kept(tmp_path, *(group(step, *long) for step in range(1, 30)), max_bytes=2**20)
    index = read(SampleIndex(tmp_path))
    oldest = index.choose(SampleFilter(sort="step", descending=False, limit=1)).places[0].name
    kept(tmp_path, *(group(step, *long) for step in range(30, 90)), max_bytes=2**20)
    read(index)
    assert index.group(oldest) is None
    there = steps(index, SampleFilter(sort="step", descending=False, limit=1000))
    assert len(there) == index.count and there[-1] == 89 and there[0] > 1
    assert index.share == 1.0


def test_samples_without_a_value_are_sorted_last_and_paging_returns_every_sample(tmp_path):
    rewards = [0.5, None, 0.25, 1.0, None, 0.5]
    kept(tmp_path, *(group(step, answer(reward=reward)) for step, reward in enumerate(rewards, start=1)))
    index = read(SampleIndex(tmp_path))
    for descending, first in ((True, 4), (False, 3)):
        wanted, seen = SampleFilter(sort="reward", descending=descending, limit=1), []
        while True:
            choice = index.choose(wanted)
            seen += steps(index, wanted)
            if choice.after is None:
                break
            wanted = replace(wanted, after=choice.after)
        assert seen[0] == first and sorted(seen) == [1, 2, 3, 4, 5, 6] and set(seen[-2:]) == {2, 5}


def test_sample_index_over_its_limit_keeps_only_the_newest_samples(tmp_path):
    kept(tmp_path, *(group(step) for step in range(1, 26)))
    index = read(SampleIndex(tmp_path, most=10))
    assert index.count == 10 and index.left_out == 15
    assert sorted(steps(index, SampleFilter())) == list(range(16, 26))


def test_sample_index_ignores_malformed_and_incomplete_lines(tmp_path):
    kept(tmp_path, group(1))
    (path,) = (tmp_path / "samples").iterdir()
    with path.open("ab") as file:
        file.write(b"not json\n[]\n{}\n" + b'{"kind":"trained","step":2,"ti')
    index = read(SampleIndex(tmp_path))
    assert index.count == 1
    path.unlink()
    assert index.choose(SampleFilter()).places and index.group(index.choose(SampleFilter()).places[0].name) is None
    read(index)
    assert index.count == 0
