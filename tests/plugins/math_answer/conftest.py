"""Fixture of a math verifier; all tests of a file share it, and its event loop, because it takes seconds to start."""

import pytest_asyncio

from pipelinerl.plugins.math_answer.verifier import MathAnswer
from tests.patience import PATIENCE_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math_answer():
    verifier = MathAnswer(deadline_s=PATIENCE_S)
    yield verifier
    await verifier.close()
