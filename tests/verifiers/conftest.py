"""The math verifier with its worker process, ended after the test."""

from collections.abc import AsyncIterator

import pytest

from pipelinerl.verifiers.math_answer import MathAnswer
from tests.patience import PATIENCE_S


@pytest.fixture
async def math_answer() -> AsyncIterator[MathAnswer]:
    verifier = MathAnswer(deadline_s=PATIENCE_S)
    yield verifier
    await verifier.close()
