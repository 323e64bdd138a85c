"""`pipelinerl oubliette serve`: this machine's sandbox as an HTTP service."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.errors import UserError
from pipelinerl.system.http_service import listen, serve, url_of
from pipelinerl.verifiers.oubliette import probe
from pipelinerl.verifiers.oubliette.remote.service import OublietteService, create_app
from pipelinerl.verifiers.oubliette.repository import PersistentRepository, TransientRepository
from pipelinerl.verifiers.oubliette.runner import LocalRunner
from pipelinerl.verifiers.oubliette.runs import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the service.

    Attributes:
        key_variable: environment variable with the token that requests must carry; if empty, the service may listen
            only on loopback.
        transient_bytes: memory for outputs and for programs that are judged once.
    """

    repository: Path
    host: str
    port: int
    tier: Tier
    at_once: int
    key_variable: str
    transient_bytes: int


def serve_sandbox(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        UserError: the sandbox, the repository, the token or the port is unavailable.
    """
    token = os.environ.get(options.key_variable) if options.key_variable else None
    if options.key_variable and not token:
        raise UserError(f"--key-variable names ${options.key_variable}, which is not set in this environment")
    persistent, transient = PersistentRepository(options.repository), TransientRepository(options.transient_bytes)
    with listen(options.host, options.port) as listener:
        sandbox = probe.opened(options.tier, at_once=options.at_once)
        runner = LocalRunner(
            sandbox, tier=str(options.tier), at_once=options.at_once, repository=persistent, outputs=transient
        )
        service = OublietteService(runner, tier=options.tier, persistent=persistent, transient=transient)
        host, port = listener.getsockname()[:2]
        print(f"oubliette: the {options.tier} sandbox at {url_of(host, port)}", flush=True)
        try:
            serve(create_app(service, token=token), listener)
        finally:
            asyncio.run(service.close())
