"""The command `pipelinerl trainer-rank`, which `cli` registers: reads the arguments, and imports what does the work."""

from __future__ import annotations

from typing import Annotated

import typer


def trainer_rank(
    rank: Annotated[int, typer.Option(help="1 and above, below trainer.options.distributed.processes.")],
    recipe: Annotated[str, typer.Option(help="Recipe of the run; the same for every role.")] = "tiny",
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change of the recipe: section.key=value.")] = None,
) -> None:
    """A further process of a JAX trainer (trainer.options.distributed); obeys `trainer`, which is rank 0."""
    from pipelinerl.config.recipe import load
    from pipelinerl.roles import trainer_rank_role

    trainer_rank_role.run(load(recipe, changes or []), rank=rank)
