"""The problem sources that a recipe names, as the mixtures that the controller draws from."""

from __future__ import annotations

from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.mixture import Domain, Mixture
from pipelinerl.data.problems import Split, open_source


def training_problems(config: RunConfig) -> Mixture:
    """Problems to train on: problem i is a function of (seed, mixture, i)."""
    return problems_of(config, Split.TRAIN, seed=config.run.seed)


def held_out_problems(config: RunConfig) -> Mixture:
    """Problems never trained on; the same for every seed, so that runs can be compared."""
    return problems_of(config, Split(config.evaluation.split), seed=0)


def problems_of(config: RunConfig, split: Split, *, seed: int) -> Mixture:
    """The mixture over one split, in the order that `seed` gives."""
    return Mixture(
        [
            Domain(
                name=domain.name,
                weight=domain.weight,
                source=open_source(
                    domain.source, domain=domain.name, split=split, seed=seed, parameters=domain.parameters
                ),
            )
            for domain in config.domains
        ],
        seed=seed,
    )
