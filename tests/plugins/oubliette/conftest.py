"""Sandboxes of the default isolation tier: one shared by a process's tests, and one per test. Skipped without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.runs import SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = probe.opened(Tier.DEFAULT)
    except SandboxMissing as error:
        pytest.skip(f"left out: whatever runs code, since {error}")
    yield opened
    opened.close()


@pytest.fixture
def alone(sandbox: Sandbox) -> Iterator[Sandbox]:
    """Yield a new sandbox that runs one program at a time."""
    opened = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=1)
    yield opened
    opened.close()
