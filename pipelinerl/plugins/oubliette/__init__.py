"""Verification of answers that are programs: the sandbox that runs them, its tiers, and its remote service."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import VerifierComponent

COMPONENT: Final = VerifierComponent(
    build="pipelinerl.plugins.oubliette.verifier:Oubliette",
    check_problem="pipelinerl.plugins.oubliette.verifier:refuse_unreadable",
    needs_reference=False,
)
