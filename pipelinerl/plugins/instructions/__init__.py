"""Instructions that a program can verify: their wording in prompts, their parsing from data sets, and their scoring."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import SourceComponent, VerifierComponent

SOURCE: Final = SourceComponent(build="pipelinerl.plugins.instructions.source:open_instructions")
VERIFIER: Final = VerifierComponent(
    build="pipelinerl.plugins.instructions.verifier:InstructionFollowing",
    check_problem="pipelinerl.plugins.instructions.verifier:instructions_of_problem",
    needs_reference=False,
)
