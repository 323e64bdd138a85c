"""Verifiers as a separate service: its wire format, its server, and the client by which actors use it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import typer

from pipelinerl.component import Component
from pipelinerl.roles.role import OnExit, Role, RoleOptions


@partial(Role, name="verifier-0", port=8200, on_exit=OnExit.DONE, stop_order=2)
def verifier(
    options: RoleOptions,
    domain: Annotated[list[str] | None, typer.Option(help="Judge only this domain; repeatable (default: all).")] = None,
) -> None:
    """Judge answers for the actors of a run (verification.services), on any machine that reaches the controller."""
    from pipelinerl.plugins.verifier_service.server import run
    from pipelinerl.roles.catalogue import run_role

    run_role("verifier", options, partial(run, only=domain or ()))


ROLE: Final = verifier
COMPONENT: Final = Component(build="pipelinerl.plugins.verifier_service.client:VerifierServices")
