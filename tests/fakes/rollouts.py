"""Rollout groups for tests that need no real streams or engines."""

from dataclasses import replace

import numpy as np

from pipelinerl.types import ROOT, Outcome, Rollout, RolloutGroup, Turn, TurnNote, Verdict, VersionSpan


def rollout(*, reward=1.0, prompt=(1, 2), sampled=(3, 4), spans=None, version=0, epoch=1, outcome=None, logprob=-0.5):
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


def group(index, rewards=(0.0, 1.0), *, version=0, epoch=1):
    return RolloutGroup(
        group_id=f"prompt-{index:06d}",
        index=index,
        domain="test",
        actor="actor-0",
        rollouts=tuple(rollout(reward=reward, version=version, epoch=epoch) for reward in rewards),
    )


def episode(turns, parents=(), *, reward=1.0, rewards=(), versions=(), logprob=-0.5):
    """Return a rollout of several turns, each given as (context, sampled tokens); `versions` has one per turn."""
    made = []
    for number, (context, sampled) in enumerate(turns):
        (turn,) = rollout(
            prompt=context, sampled=sampled, version=versions[number] if versions else 0, logprob=logprob
        ).turns
        made.append(replace(turn, note=TurnNote(rewards[number] if rewards else 0.0, "main")))
    return replace(rollout(reward=reward), turns=tuple(made), parents=tuple(parents))


def as_roots(one):
    """Return the rollout with each turn as a conversation of its own, whose context repeats all earlier tokens."""
    turns = list[Turn]()
    for number, turn in enumerate(one.turns):
        parent = one.parents[number] if one.parents else number - 1
        before = [] if parent == ROOT else [turns[parent].context_token_ids, turns[parent].token_ids]
        turns.append(replace(turn, context_token_ids=np.concatenate([*before, turn.context_token_ids])))
    return replace(one, turns=tuple(turns), parents=(ROOT,) * len(turns))
