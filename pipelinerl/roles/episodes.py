"""Opens the environments that play the episodes of domains, as configured in the recipe."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from pipelinerl.actor.episodes import EpisodeDomain, Player
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.environments.command import Commands
from pipelinerl.environments.environment import VERIFIERS
from pipelinerl.environments.host_pool import EpisodeHosts, check_taskset
from pipelinerl.environments.tool_loop import OneRequest, Toolbox
from pipelinerl.environments.user_code import load_play
from pipelinerl.errors import RecipeError, ReferenceFailed
from pipelinerl.plugins.oubliette.runs import SandboxMissing
from pipelinerl.plugins.oubliette.sandbox import isolation_of
from pipelinerl.plugins.oubliette.verifier import PythonTool
from pipelinerl.verifiers.verifier import GroupVerifier
from pipelinerl.verifiers.worker_pool import num_cores

#: Programs of `command` wait for the model most of the time, so a core serves several.
_PROGRAMS_PER_CORE: Final = 4


def open_episodes(config: RunConfig, verifiers: Mapping[str, GroupVerifier]) -> dict[str, EpisodeDomain]:
    """Return the domains that have an environment, by name; the caller closes them. No environment is started yet."""
    return {
        domain.name: EpisodeDomain(
            player=_player(domain),
            limits=domain.episode.limits,
            places=places_of(domain),
            verifier=verifiers.get(domain.name),
            correct_at=domain.correct_at,
            tools=Toolbox(PythonTool(domain.oubliette.rules, workers=domain.verifier_workers))
            if domain.episode.tools
            else None,
        )
        for domain in config.domains
        if domain.has_environment
    }


def check_environment(domain: DomainSection) -> None:
    """Load the domain's environment, if it has one, and check that its tools can work here; start nothing.

    Raises:
        RecipeError: the environment cannot be loaded or has a wrong type, or its tools need a missing sandbox.
    """
    if domain.episode.tools and not domain.oubliette.url:
        try:
            isolation_of(domain.oubliette.tier, 0)
        except SandboxMissing as error:
            raise RecipeError(f"domains.{domain.name}.episode.tools: {error}") from None
    if domain.environment is None:
        return
    try:
        if domain.environment.startswith(VERIFIERS):
            check_taskset(domain.environment, domain.environment_options)
        else:
            load_play(domain.environment, domain.environment_options)
    except ReferenceFailed as error:
        raise RecipeError(f"domains.{domain.name}.environment: {error}") from None


def places_of(domain: DomainSection) -> asyncio.Semaphore | None:
    """Return the limit on the domain's episodes at once; starting too many programs would silence the actor."""
    most = domain.episode.concurrent
    if most is None and domain.command:
        most = _PROGRAMS_PER_CORE * num_cores()
    return None if most is None else asyncio.Semaphore(most)


def _player(domain: DomainSection) -> Player:
    if domain.environment is not None:
        return EpisodeHosts(domain.environment, domain.environment_options)
    return Commands(domain.command) if domain.command else OneRequest()
