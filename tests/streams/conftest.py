"""Fixtures: one Redis server for all tests of the folder, where each test has its own namespace; or a memory stream."""

import pytest

from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.redis_stream import open_stream
from tests.patience import PATIENCE_S


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def streams(request):
    kind = request.param
    url = "memory://" if kind == "memory" else request.getfixturevalue("server").url
    opened = await open_stream(url, namespace=request.node.nodeid, timeout_s=PATIENCE_S, max_length=10)
    yield opened
    await opened.close()
