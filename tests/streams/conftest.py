"""Fixtures: one Redis server for all tests of the folder, where each test has its own namespace; or a memory stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import Stream
from tests.patience import PATIENCE_S


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def streams(request: pytest.FixtureRequest) -> AsyncIterator[Stream]:
    kind = request.param
    url = "memory://" if kind == "memory" else request.getfixturevalue("server").url
    opened = await open_stream(url, namespace=request.node.nodeid, timeout_s=PATIENCE_S, max_length=10)
    yield opened
    await opened.close()
