"""Verifiers as a recipe's domain opens them."""

from contextlib import asynccontextmanager

from pipelinerl.config.domains import DomainSection
from pipelinerl.roles.verification import open_verifier


@asynccontextmanager
async def opened(verifier=None, *, budget=None, **domain):
    """Open the verifier of a domain with these settings; close it at the end."""
    section = DomainSection(**{"name": "d", "source": "addition", "verifier": verifier} | domain)
    made = open_verifier(section, budget=budget)
    try:
        yield made
    finally:
        await made.close()
