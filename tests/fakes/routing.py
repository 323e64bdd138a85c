"""Rollouts with routed experts: for each token, the experts that computed it."""

from dataclasses import replace

from pipelinerl.rng import generator
from tests.fakes.rollouts import group
from trainer_contract.types import RoutingShape


def routed(turn, *, layers=2, top_k=2, experts=4, seed=0):
    draw, dtype = generator(seed, "routing"), RoutingShape(layers, experts, top_k).dtype
    return replace(
        turn,
        routed_experts=draw.integers(0, experts, (len(turn.token_ids), layers, top_k)).astype(dtype),
        context_routed_experts=draw.integers(0, experts, (len(turn.context_token_ids), layers, top_k)).astype(dtype),
    )


def routed_group(index, rewards=(0.0, 1.0), *, layers=2, top_k=2, experts=4):
    bare = group(index, rewards)
    return replace(
        bare,
        rollouts=tuple(
            replace(
                rollout,
                turns=tuple(
                    routed(turn, layers=layers, top_k=top_k, experts=experts, seed=number) for turn in rollout.turns
                ),
            )
            for number, rollout in enumerate(bare.rollouts)
        ),
    )
