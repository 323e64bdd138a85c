"""Opens what plays a domain's episodes, as its section of the recipe says."""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.actor.episodes import EpisodeDomain, Player
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.environments.command import Commands
from pipelinerl.environments.host_pool import EpisodeHosts
from pipelinerl.environments.user_code import load_play
from pipelinerl.errors import RecipeError, ReferenceFailed
from pipelinerl.verifiers.verifier import GroupVerifier


def open_episodes(config: RunConfig, verifiers: Mapping[str, GroupVerifier]) -> dict[str, EpisodeDomain]:
    """Return the domains with an environment, by name, to be closed. Nothing starts before the first episode."""
    return {
        domain.name: EpisodeDomain(
            player=_player(domain),
            limits=domain.episode.limits,
            verifier=verifiers.get(domain.name),
            correct_at=domain.correct_at,
        )
        for domain in config.domains
        if domain.has_environment
    }


def check_environment(domain: DomainSection) -> None:
    """Load the domain's environment, if it has one.

    Raises:
        RecipeError: it cannot be loaded, or is neither an async function nor an environment.
    """
    if domain.environment is None:
        return
    try:
        load_play(domain.environment)
    except ReferenceFailed as error:
        raise RecipeError(f"domains.{domain.name}.environment: {error}") from None


def _player(domain: DomainSection) -> Player:
    return Commands(domain.command) if domain.environment is None else EpisodeHosts(domain.environment)
