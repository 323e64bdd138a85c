"""Ranks of weight groups on this machine: rank 0, as the trainer joins, and the request with which an engine joins."""

from inference_contract.weights import Backend, InitProcessGroupRequest
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast.collective import Collective
from tests.patience import PATIENCE_S

_PAIR = {"group": "g", "generation": 1, "world_size": 2, "timeout_s": PATIENCE_S}


def joining(port, generation=1, **fields):
    """Return the request with which rank 1 of 2 joins."""
    at = {"backend": Backend.GLOO, "rendezvous_host": "127.0.0.1", "rendezvous_port": port, "rank": 1}
    return InitProcessGroupRequest(**(_PAIR | at | {"generation": generation} | fields))


def rank(rendezvous, number=0, **fields):
    """Let a rank join in a thread of its own; return the future of its `Collective`."""
    given = _PAIR | {"host": rendezvous.host, "port": rendezvous.port, "rank": number} | fields
    return in_background(f"rank-{number}", lambda: Collective.join(**given))


def ranks(rendezvous, size=2, **fields):
    """Return the `Collective`s of all ranks of a new group."""
    joins = [rank(rendezvous, number, world_size=size, **fields) for number in range(size)]
    return [join.result(PATIENCE_S) for join in joins]
