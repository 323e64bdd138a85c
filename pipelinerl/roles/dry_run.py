"""`pipelinerl check`: build everything that a recipe names, short of processes, and say what was found."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl import registry
from pipelinerl.config import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.roles.controller_role import knobs_of
from pipelinerl.roles.sources import held_out_problems, training_problems
from pipelinerl.roles.trainer_role import objective_of


def findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(part, finding) for each part of the recipe, in the order of dependence.

    Raises:
        UserError: the first thing that would stop the run.
    """
    tokenizer = ChatTokenizer.load(config.model.resolved)
    yield "model", f"{config.model.resolved} with {tokenizer.vocab_size} tokens"
    registry.load("engine.type", registry.ENGINES, config.engine.type)
    yield "engine", f"{config.engine.count} × {config.engine.type}, {config.engine.slots} slots each"
    registry.load("trainer.type", registry.TRAINERS, config.trainer.type)
    yield "trainer", f"{config.trainer.type}, {config.trainer.precision}"
    objective = objective_of(config)
    yield "objective", f"needs {', '.join(sorted(objective.needs)) or 'nothing beyond the rollouts'}"
    knobs = knobs_of(config)
    yield "staleness", f"j = {knobs.j}, k = {knobs.k:g}"
    for domain in config.domains:
        registry.load(f"domains.{domain.name}.verifier", registry.VERIFIERS, domain.verifier)
    for name, mixture in (("training", training_problems(config)), ("held out", held_out_problems(config))):
        problem = mixture.problem(0)
        prompt = tokenizer.encode_chat(problem.messages)
        room = config.engine.context_length - config.sampling.max_tokens
        if len(prompt) > room:
            raise RecipeError(
                f"engine.context_length: the first {name} prompt has {len(prompt)} tokens and sampling.max_tokens is "
                f"{config.sampling.max_tokens}, together more than {config.engine.context_length}"
            )
        yield name, f"{problem.messages[-1].content!r} → {problem.ground_truth!r}"
