"""Verifiers map an answer to an outcome and a reward. A failure of the verifier never counts as a wrong answer."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import VerifierComponent

REASONING_GYM: Final = VerifierComponent(
    build="pipelinerl.verifiers.reasoning_gym:open_verifier",
    needs=("reasoning_gym",),
    remedy="pip install -e '.[gym]'",
    deterministic=True,
    check_problem="pipelinerl.verifiers.reasoning_gym:entry_of",
)
