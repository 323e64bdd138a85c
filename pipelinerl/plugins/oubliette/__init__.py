"""Verification of answers that are programs: the sandbox that runs them, its tiers, and its remote service."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl.component import CommandComponent, VerifierComponent

COMPONENT: Final = VerifierComponent(
    build="pipelinerl.plugins.oubliette.verifier:Oubliette",
    check_problem="pipelinerl.plugins.oubliette.verifier:refuse_unreadable",
    needs_reference=False,
)
COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.oubliette.command_line:oubliette_app",
    help="Test the code sandbox, run programs in it, serve it, upload tests.",
)
#: The command's earlier name.
EARLIER_COMMAND: Final = replace(COMMAND, hidden=True)
