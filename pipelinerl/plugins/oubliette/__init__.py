"""Verification of answers that are programs: the sandbox that runs them, its tiers, and its remote service."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl.component import CommandComponent, SourceComponent, ToolComponent, VerifierComponent
from pipelinerl.plugins.oubliette.section import OublietteSection

VERIFIER: Final = VerifierComponent(
    build="pipelinerl.plugins.oubliette.verifier:open_verifier",
    section=OublietteSection,
    deterministic=True,
    places=frozenset({"url", "key_variable", "repository"}),
    probe="pipelinerl.plugins.oubliette.verifier:tier_of_opened",
    check_problem="pipelinerl.plugins.oubliette.verifier:refuse_unreadable",
    needs_reference=False,
)
PROGRAMS: Final = SourceComponent(build="pipelinerl.plugins.oubliette.programs:open_programs")
COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.oubliette.command_line:oubliette_app",
    help="Test the code sandbox, run programs in it, serve it, upload tests.",
)
#: The command's earlier name.
EARLIER_COMMAND: Final = replace(COMMAND, hidden=True)
PYTHON: Final = ToolComponent(
    build="pipelinerl.plugins.oubliette.verifier:PythonTool",
    section=OublietteSection,
    key="oubliette",
    check="pipelinerl.plugins.oubliette.verifier:check_sandbox",
)
