"""The math verifier with its worker process, ended after the test."""

from collections.abc import AsyncIterator

import pytest

from pipelinerl.verifiers.math_answer import MathAnswer


@pytest.fixture
async def math_answer() -> AsyncIterator[MathAnswer]:
    verifier = MathAnswer(deadline_s=20.0)
    yield verifier
    await verifier.close()
