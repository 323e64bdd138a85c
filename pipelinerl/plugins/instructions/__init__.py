"""Instructions that a program can verify: their wording in prompts, their parsing from data sets, and their scoring."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import SourceComponent, VerifierComponent
from pipelinerl.plugins.instructions.catalogue import Matching, Score
from pipelinerl.section import Section


class InstructionsSection(Section):
    """Scoring of answers by the verifier `instruction_following`."""

    score: Score = Score.SHARE
    """The reward: the share of instructions that the answer follows, or 1 only if it follows all."""
    matching: Matching = Matching.STRICT
    """With `loose`, the answer is also checked without its first or last line and without asterisks."""


SOURCE: Final = SourceComponent(build="pipelinerl.plugins.instructions.source:open_instructions")
VERIFIER: Final = VerifierComponent(
    build="pipelinerl.plugins.instructions.verifier:open_verifier",
    section=InstructionsSection,
    key="instructions",
    deterministic=True,
    check="pipelinerl.plugins.instructions.verifier:findings",
    check_problem="pipelinerl.plugins.instructions.verifier:instructions_of_problem",
    needs_reference=False,
)
