"""A language model as the verifier of answers (LLM as a judge)."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import VerifierComponent
from pipelinerl.plugins.judge.section import JudgeSection

COMPONENT: Final = VerifierComponent(
    build="pipelinerl.plugins.judge.verifier:open_judge",
    section=JudgeSection,
    trial={"votes": 1},
    needs_reference=False,
)
