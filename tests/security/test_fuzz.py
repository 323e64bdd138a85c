"""Requests that are right but for something: no server fails, keeps others waiting or keeps memory.

Seeds are 0, 1, 2, …; the many come in parts, each with a seed and servers of its own, so that any can be asked again:
`make chaos ARGS="-k test_many_requests"`, and then `--lf` for what failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.security.campaign import Findings, campaign
from tests.security.servers import FUZZED, SERVERS

#: Of a server that has been asked a while; allocators keep what a large body took.
_MOST_GROWN_BYTES: Final = 32 * 2**20
_PARTS: Final = 7


async def fuzzed(server: str, directory: Path, *, seed: int, count: int) -> Findings:
    found = await campaign(server, directory, seed=seed, count=count)
    assert found.failures == [], "\n".join([str(found), *found.failures[:5]])
    assert found.stall.seconds < 1.0, "\n".join([str(found), "stalled by one of", *found.stalled_by])
    return found


@pytest.mark.parametrize("server", SERVERS)
async def test_a_few_requests(server: str, tmp_path: Path) -> None:
    found = await fuzzed(server, tmp_path, seed=0, count=700)
    assert found.statuses[200] > 20 and found.statuses[422] + found.statuses[400] > 100, str(found)


@pytest.mark.parametrize("server", FUZZED)
@pytest.mark.parametrize("part", range(1, _PARTS + 1))
@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_many_requests(server: str, part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await fuzzed(server, tmp_path, seed=part, count=5_000)
    with capsys.disabled():
        print(f"\n{server}, part {part} of {_PARTS}: {found}")
    assert found.grown_bytes < _MOST_GROWN_BYTES, str(found)
