"""How test processes beside each other collect: each begins at another folder, and all end with the same order.

Promises that every process has the same tests in the same order, and that collecting costs as little as can be: pytest
writes the assertions of a file anew, and keeps what comes of it for whoever imports the file next. In one order all
processes would do so with each file at once, which is half of what collecting takes.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect
from collections.abc import Generator, Sequence
from itertools import accumulate, chain, zip_longest
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
#: Where single tests take minutes: these begin first, and the short ones fill the gaps between them and their ends. The
#: longest file is the first, since nothing shares its tests out.
_LONG = (
    "tests/end_to_end/test_live_run.py", "tests/end_to_end/", "tests/faults/", "tests/observability/page/",
    "tests/examples/", "tests/trainers/", "tests/engines/",
)  # fmt: skip
#: Where tests wait for processes, deadlines and disks more than they compute: dealt between the others. All at the end,
#: as their names would have it, they leave half of two cores idle for minutes.
_WAITING = (
    "tests/commands/top/", "tests/faults/", "tests/inference_contract/", "tests/launch/", "tests/observability/page/",
    "tests/roles/", "tests/security/", "tests/streams/", "tests/system/", "tests/verifiers/",
    "tests/weights/",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: nobody looks for garbage among it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The folders of tests/, from another one on in each process."""
    report = yield
    if collector.path == _TESTS and report.result:
        report.result[:] = _begun_elsewhere(report.result)
    return report


def _begun_elsewhere(children: Sequence[pytest.Item | pytest.Collector]) -> list[pytest.Item | pytest.Collector]:
    """The same, from the one on before which other processes are to have imported their share, by size of source."""
    process, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    ends = list(accumulate(_size(child.path) for child in children))
    first = bisect(ends, ends[-1] * int(process.removeprefix("gw")) / int(count))
    return [*children[first:], *children[:first]]


def _size(path: Path) -> int:
    """Bytes of test files."""
    return sum(file.stat().st_size for file in (path.rglob("test_*.py") if path.is_dir() else [path]))


@pytest.hookimpl(trylast=True)  # when what is not asked for has been left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which processes beside each other are done soonest, whichever was collected first.

    One that waits comes after one that computes, as long as there are both.
    """
    ranks = {place: rank for rank, place in enumerate(_LONG)}

    def place(item: pytest.Item) -> tuple[int, Path]:
        return min((ranks[p] for p in _LONG if item.nodeid.startswith(p)), default=len(_LONG)), item.path

    items.sort(key=place)
    files = dict.fromkeys((item.path, item.nodeid.startswith(_WAITING)) for item in items)
    computing, waiting = ([path for path, waits in files if waits is kind] for kind in (False, True))
    dealt = {path: turn for turn, path in enumerate(chain.from_iterable(zip_longest(computing, waiting)))}
    items.sort(key=lambda item: dealt[item.path])
