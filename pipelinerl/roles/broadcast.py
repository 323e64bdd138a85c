"""The transport `broadcast`: the trainer sends its weights to all engines at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipelinerl.component import TransportComponent
from pipelinerl.errors import RecipeError

if TYPE_CHECKING:  # not imported at run time, because checks read the component
    from pipelinerl.roles.process import Identity
    from pipelinerl.streams.stream import Stream
    from pipelinerl.weights.engine_control import EngineControl
    from pipelinerl.weights.grace import Grace
    from pipelinerl.weights.publisher import Publisher

COMPONENT: Final = TransportComponent(build="pipelinerl.roles.broadcast:publisher_of")


def publisher_of(identity: Identity, control: EngineControl, stream: Stream, grace: Grace) -> Publisher:
    """Return the publisher of broadcasts; raise `RecipeError` if torch lacks the recipe's backend."""
    from pipelinerl.weights.broadcast.collective import offers
    from pipelinerl.weights.broadcast.publisher import BroadcastPublisher

    weights = identity.config.weights
    if not offers(weights.backend):
        raise RecipeError(f"weights.backend is {weights.backend}, which torch cannot use here; use gloo")
    return BroadcastPublisher(control, host=weights.host, backend=weights.backend, grace=grace)
