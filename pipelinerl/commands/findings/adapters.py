"""What `pipelinerl check` finds of LoRA: which layers get adapters, and how much of the model trains."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from trainer_contract.errors import SpecError


def adapter_findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Nothing where every weight trains.

    Raises:
        RecipeError: the model has no such layers.
    """
    if config.trainer.type != "torch" or config.trainer.options.get("lora") is None:
        return
    from pipelinerl.trainers.torch.lora.lora_options import lora_of
    from pipelinerl.trainers.torch.lora.targets import described

    try:
        options = lora_of(config.trainer.options)
        if options is not None:
            yield "adapters", described(config.model.resolved, options)
    except SpecError as error:
        raise RecipeError(f"trainer.{error}") from error
