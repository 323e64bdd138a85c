"""A language model as the verifier of answers (LLM as a judge)."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import VerifierComponent

COMPONENT: Final = VerifierComponent(build="pipelinerl.plugins.judge.verifier:Judge", needs_reference=False)
