"""Requests that are right but for something: no server fails, stalls others or keeps memory. Seeds are 0, 1, 2, …"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.controller.service.api import create_api
from tests.controller.service.test_service import running
from tests.security.fuzzer import Findings, campaign
from tests.security.servers import SERVERS, TOKEN, application


@asynccontextmanager
async def served(server: str, directory: Path) -> AsyncIterator[Any]:
    if server != "controller":
        import_module("torch")  # which the first join of an engine needs, and which takes seconds
        yield application(server, directory)
        return
    async with running(directory) as run:
        yield create_api(run.service, token=TOKEN)


async def fuzzed(server: str, directory: Path, *, seed: int, count: int) -> Findings:
    async with served(server, directory) as app, app.router.lifespan_context(app):
        found = await campaign(app, seed=seed, count=count, token=TOKEN)
    assert found.failures == [], "\n".join([str(found), *found.failures[:5]])
    assert found.longest_stall_s < 1.0, str(found)
    return found


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.timeout(120)
async def test_a_few_requests(server: str, tmp_path: Path) -> None:
    found = await fuzzed(server, tmp_path, seed=0, count=700)
    assert found.statuses[200] > 20 and found.statuses[422] + found.statuses[400] > 100, str(found)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.chaos
@pytest.mark.timeout(7200)
async def test_many_requests(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await fuzzed(server, tmp_path, seed=1, count=35_000)
    with capsys.disabled():
        print(f"\n{server}: {found}")
    assert found.grown_bytes < 64 * 2**20, str(found)
