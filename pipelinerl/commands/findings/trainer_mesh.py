"""What `pipelinerl check` finds of a torch trainer's mesh: the processes that it makes, and whether heads divide."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.models.model_shape import read_shape
from trainer_contract.errors import SpecError


def mesh_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Nothing of a trainer of one process.

    Raises:
        RecipeError: attention's heads cannot be divided among the processes that share tokens.
    """
    if config.trainer.type != "torch" or config.trainer.options.get("mesh") is None:
        return
    from pipelinerl.trainers.torch.mesh import refuse_heads
    from pipelinerl.trainers.torch.options import mesh_of

    mesh = mesh_of({"mesh": config.trainer.options["mesh"]})
    if mesh.size == 1:
        return
    try:
        refuse_heads(read_shape(config.model.resolved).heads, mesh.cp)
    except SpecError as error:
        raise RecipeError(f"trainer.{error}") from error
    shared = f", each computed by {mesh.cp} processes" if mesh.cp > 1 else ""
    yield (
        "mesh",
        f"{mesh.size} processes, a copy of the model over {mesh.shards}; {mesh.width} micro-batches at once{shared}",
    )
