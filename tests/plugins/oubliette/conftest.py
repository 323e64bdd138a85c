"""Sandboxes of the default isolation tier: one shared by a process's tests, and one per test. Skipped without them."""

import pytest

from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.runs import SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of


@pytest.fixture(scope="session")
def sandbox():
    try:
        opened = probe.opened(Tier.DEFAULT)
    except SandboxMissing as error:
        pytest.skip(f"left out: whatever runs code, since {error}")
    yield opened
    opened.close()


@pytest.fixture
def alone(sandbox):
    opened = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=1)
    yield opened
    opened.close()
