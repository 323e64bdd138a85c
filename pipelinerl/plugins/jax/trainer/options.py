"""`JaxOptions`, the recipe's `trainer.options` for the JAX trainer.

[trainer]
type = "jax"
options.mesh = { data = 2, fsdp = 4, tensor = 2 }
options.remat = "inference_matched"
options.attention = "dense"
options.distributed = { coordinator = "10.0.0.1:8476", processes = 4, token_file = "/shared/token" }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from pipelinerl.plugins.jax.trainer.attention import PackedAttention
from pipelinerl.plugins.jax.trainer.mesh import MeshShape
from pipelinerl.trainers.option_table import refuse_lora, refuse_unknown, table, whole
from pipelinerl.trainers.ranks.rendezvous import Distributed, read_distributed
from trainer_contract.errors import SpecError

_NAME: Final = "JAX"


class Remat(StrEnum):
    """The activations that the forward pass keeps for the backward pass; all others are recomputed."""

    NONE = "none"
    """Keep all activations: fastest if they fit into memory."""
    MATMULS = "matmuls"
    """Keep the results of linear layers, recompute attention and pointwise operations."""
    INFERENCE_MATCHED = "inference_matched"
    """Keep only each layer's output (RLAX §5.1); XLA then fuses as in inference, so log-probs equal `forward`'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxOptions:
    """Options of the JAX trainer; `distributed` None means one process, `attention` None the device's default."""

    mesh: MeshShape
    remat: Remat = Remat.NONE
    attention: PackedAttention | None = None
    distributed: Distributed | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], *, gradient_checkpointing: bool) -> JaxOptions:
        """Parse `TrainerSpec.options`; `gradient_checkpointing` sets the default of `remat`. Raises SpecError."""
        refuse_lora(options)
        refuse_unknown(options, [field.name for field in fields(cls)], "options", trainer=_NAME)
        remat = options.get("remat", Remat.INFERENCE_MATCHED if gradient_checkpointing else Remat.NONE)
        if remat not in list(Remat):
            raise SpecError(f"options.remat must be one of {', '.join(Remat)}, got {remat!r}")
        attention = options.get("attention")
        if attention is not None and attention not in list(PackedAttention):
            raise SpecError(f"options.attention must be one of {', '.join(PackedAttention)}, got {attention!r}")
        mesh = table(options.get("mesh", {}), MeshShape, "options.mesh", trainer=_NAME)
        distributed = options.get("distributed")
        return cls(
            mesh=MeshShape(**{name: whole(value, f"options.mesh.{name}", least=1) for name, value in mesh.items()}),
            remat=Remat(remat),
            attention=None if attention is None else PackedAttention(attention),
            distributed=None if distributed is None else read_distributed(distributed, trainer=_NAME),
        )
