"""Fixture of a sandbox of the default isolation tier, shared by a process's tests; they are skipped without it."""

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
