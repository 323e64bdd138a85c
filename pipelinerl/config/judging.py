"""Sections of a domain that say how a registered verifier judges, where it can be told: docs/verification.md."""

from __future__ import annotations

from pipelinerl.config.sections import Section
from pipelinerl.instructions.scoring import Matching, Score


class InstructionsSection(Section):
    """How the verifier `instruction_following` counts."""

    score: Score = Score.SHARE
    """What an answer is worth: the share of instructions that it follows, or 1 only if it follows all."""
    matching: Matching = Matching.STRICT
    """Whether an answer is also looked at without its first or last line and its asterisks (`loose`)."""
