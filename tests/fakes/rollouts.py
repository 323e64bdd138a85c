"""Rollout groups for tests above the streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn, Verdict, VersionSpan


def rollout(
    *,
    reward: float = 1.0,
    prompt: Sequence[int] = (1, 2),
    sampled: Sequence[int] = (3, 4),
    spans: Sequence[tuple[int, int]] | None = None,
    version: int = 0,
    epoch: int = 1,
    outcome: Outcome | None = None,
    logprob: float = -0.5,
) -> Rollout:
    """Return a single-turn rollout; by default all its tokens come from `version`."""
    judged = Outcome.CORRECT if reward > 0 else Outcome.WRONG
    turn = Turn(
        context_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(sampled, np.int32),
        behavior_logprobs=np.full(len(sampled), logprob, np.float32),
        spans=tuple(VersionSpan(*span) for span in (spans or [(version, len(sampled))])),
    )
    return Rollout(
        turns=(turn,),
        verdict=Verdict(outcome=outcome or judged, reward=reward),
        finish_reason="stop",
        temperature=1.0,
        epoch=epoch,
    )


def group(index: int, rewards: Sequence[float] = (0.0, 1.0), *, version: int = 0, epoch: int = 1) -> RolloutGroup:
    """Return a group whose rollouts earned `rewards`."""
    return RolloutGroup(
        group_id=f"prompt-{index:06d}",
        index=index,
        domain="test",
        actor="actor-0",
        rollouts=tuple(rollout(reward=reward, version=version, epoch=epoch) for reward in rewards),
    )
