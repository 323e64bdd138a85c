"""Pytest hooks: each parallel test process begins to collect at another folder, and all run the tests in one order.

pytest rewrites the assertions of a file and caches the result for other processes. If all processes collected in the
same order, each would rewrite every file itself; rewriting takes half of the collection time.
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
#: Folders whose tests take minutes. They run first, so that short tests keep all processes busy at the end. The longest
#: file is the very first, because one process runs all tests of a file.
_LONG = (
    "tests/end_to_end/test_live_run.py", "tests/end_to_end/", "tests/faults/", "tests/plugins/watch/page/",
    "tests/examples/", "tests/trainers/", "tests/engines/",
)  # fmt: skip
#: Folders whose tests mostly wait for processes, deadlines and disks. These folders are spread between the others: if
#: they all came at the end, half of two cores would be idle for minutes.
_WAITING = (
    "tests/plugins/watch/", "tests/faults/", "tests/inference_contract/", "tests/launch/", "tests/roles/",
    "tests/security/", "tests/streams/", "tests/system/", "tests/verifiers/", "tests/weights/",
    "tests/plugins/parameter_server/", "tests/plugins/trackers/", "tests/plugins/verifier_service/",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """After collection, exclude all imported objects from garbage collection, which makes later collections faster."""
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
    """Change the order of the folders in tests/, so that each process begins to collect at a different folder."""
    report = yield
    if collector.path == _TESTS and report.result:
        report.result[:] = _begun_elsewhere(report.result)
    return report


def _begun_elsewhere(children: Sequence[pytest.Item | pytest.Collector]) -> list[pytest.Item | pytest.Collector]:
    """Rotate `children`, so that each process starts at a different one; the starts are spaced by source size."""
    process, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    ends = list(accumulate(_size(child.path) for child in children))
    first = bisect(ends, ends[-1] * int(process.removeprefix("gw")) / int(count))
    return [*children[first:], *children[:first]]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("test_*.py") if path.is_dir() else [path]))


@pytest.hookimpl(trylast=True)  # this hook runs after other plugins have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort test files so that parallel processes finish early; the result does not depend on the order of collection.

    Files whose tests mostly wait alternate with files whose tests mostly compute.
    """
    ranks = {place: rank for rank, place in enumerate(_LONG)}

    def place(item: pytest.Item) -> tuple[int, Path]:
        return min((ranks[p] for p in _LONG if item.nodeid.startswith(p)), default=len(_LONG)), item.path

    items.sort(key=place)
    files = dict.fromkeys((item.path, item.nodeid.startswith(_WAITING)) for item in items)
    computing, waiting = ([path for path, waits in files if waits is kind] for kind in (False, True))
    dealt = {path: turn for turn, path in enumerate(chain.from_iterable(zip_longest(computing, waiting)))}
    items.sort(key=lambda item: dealt[item.path])
