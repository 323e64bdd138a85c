"""One sandbox of the default tier, shared by a process's tests, which are skipped where it is unavailable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipelinerl.verifiers.oubliette import probe
from pipelinerl.verifiers.oubliette.runs import SandboxMissing, Tier
from pipelinerl.verifiers.oubliette.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = probe.opened(Tier.DEFAULT)
    except SandboxMissing as error:
        pytest.skip(f"left out: whatever runs code, since {error}")
    yield opened
    opened.close()
