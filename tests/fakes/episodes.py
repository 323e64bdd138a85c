"""A maker of episodes that serves the model to a given player."""

import asyncio
from contextlib import asynccontextmanager

from pipelinerl.config.domains import EpisodeSection
from pipelinerl.plugins.episodes.group import EpisodeDomain, Episodes
from tests.patience import PATIENCE_S


@asynccontextmanager
async def episodes(player, sampler, *, verifier=None, tools=None, places=None, patience_s=PATIENCE_S, **limits):
    """Serve episodes of the domain `talk`, played by `player` within `limits`; close the player at the end."""
    section = EpisodeSection(**{"max_turns": 4, "timeout_s": patience_s} | limits)
    domain = EpisodeDomain(player=player, limits=section, verifier=verifier, correct_at=1.0, tools=tools, places=places)
    maker = Episodes(sampler, {"talk": domain}, attempts=2)
    async with asyncio.timeout(patience_s), maker.serve():
        try:
            yield maker
        finally:
            await domain.close()
