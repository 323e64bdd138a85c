"""Opens the environments that play the episodes of domains, as configured in the recipe."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.actor.group_maker import Sampler
from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, ReferenceFailed, UserError
from pipelinerl.plugins.episodes.command import Commands
from pipelinerl.plugins.episodes.group import EpisodeDomain, Episodes, Player
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts
from pipelinerl.plugins.episodes.tool_loop import OneRequest, Tool, Toolbox
from pipelinerl.plugins.episodes.user_code import check_playable
from pipelinerl.verifiers.verifier import GroupVerifier
from pipelinerl.verifiers.worker_pool import num_cores

#: Programs of `command` wait for the model most of the time, so a core serves several.
_PROGRAMS_PER_CORE: Final = 4


def open_episodes(config: RunConfig, sampler: Sampler, verifiers: Mapping[str, GroupVerifier]) -> Episodes:
    """Return the maker of the episodes of all domains that have an environment; the caller closes it."""
    domains = {}
    for domain in config.domains:
        if not domain.has_environment:
            continue
        player: Player = Commands(domain.command) if domain.command else OneRequest()
        if domain.environment is not None:
            player = EpisodeHosts(domain.environment, domain.environment_options)
        tools: list[Tool] = []
        for name in domain.episode.tools:
            build = registry.load(f"domains.{domain.name}.episode.tools", registry.TOOLS, name)
            tools.append(build(domain.options_of(name, registry.TOOLS[name]), domain.verifier_workers))
        domains[domain.name] = EpisodeDomain(
            player=player,
            limits=domain.episode,
            places=places_of(domain),
            verifier=verifiers.get(domain.name),
            correct_at=domain.correct_at,
            tools=Toolbox(*tools) if tools else None,
        )
    return Episodes(sampler, domains, attempts=config.actor.attempts)


def check_environment(domain: DomainSection) -> None:
    """Load the domain's environment, if it has one, and check that its tools can work here; start nothing.

    Raises:
        RecipeError: the environment cannot be loaded or has a wrong type, or its tools need a missing sandbox.
    """
    where = f"domains.{domain.name}.episode.tools"
    for name in domain.episode.tools:
        tool = registry.find(where, registry.TOOLS, name)
        if tool is not None and tool.check:
            try:
                imported(tool.check)(domain.options_of(name, tool))
            except UserError as error:
                raise RecipeError(f"{where}: {error}") from None
    if domain.environment is None:
        return
    try:
        check_playable(domain.environment, domain.environment_options)
    except ReferenceFailed as error:
        raise RecipeError(f"domains.{domain.name}.environment: {error}") from None


def places_of(domain: DomainSection) -> asyncio.Semaphore | None:
    """Return the limit on the domain's episodes at once; starting too many programs would silence the actor."""
    most = domain.episode.concurrent
    if most is None and domain.command:
        most = _PROGRAMS_PER_CORE * num_cores()
    return None if most is None else asyncio.Semaphore(most)


_LOOK_S: Final = 60.0


def host_command(taskset: str, options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the command of the process that plays the taskset's episodes, and the options that it gets."""
    own = {name: value for name, value in options.items() if name != "python"}
    return [options["python"], str(Path(__file__).with_name("verifiers_host.py")), taskset], own


def check_taskset(taskset: str, options: Mapping[str, Any]) -> None:
    """Raise `ReferenceFailed` if the option `python` of a `verifiers:` environment is missing or lacks verifiers."""
    python = options.get("python")
    if not isinstance(python, str) or not os.access(python, os.X_OK):
        raise ReferenceFailed(
            f"verifiers:{taskset} needs environment_options.python, the Python of an environment with verifiers, got "
            f"{python!r}; make one by: python3 -m venv verifiers && verifiers/bin/pip install verifiers"
        )
    look = "import importlib.util as i; raise SystemExit(i.find_spec('verifiers.v1') is None)"
    if subprocess.run([python, "-c", look], capture_output=True, timeout=_LOOK_S, check=False).returncode:
        raise ReferenceFailed(f"{python} has no verifiers of version 0.4; {python} -m pip install 'verifiers>=0.4'")
