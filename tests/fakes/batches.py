"""Batches, steps and bigram trainers with the defaults that most tests of training use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.training.batch import BatchRules, build
from pipelinerl.training.step import Step
from pipelinerl.types import RolloutGroup
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import TrainerSpec


def batch_of(groups, objective="grpo", *, producing=1, token_budget=1000, **rules):
    """Build a batch; `objective` may be given as in a recipe, and `rules` are fields of `BatchRules`."""
    chosen = objective if isinstance(objective, PolicyObjective) else resolve(objective)
    return build(groups, BatchRules(token_budget=token_budget, **rules), objective=chosen, producing=producing)


def step_on(passes, **fields):
    return Step(rules=BatchRules(token_budget=1000), passes=passes, **fields)


def bigram(path: Path, *, vocab: int = 7, seed: int = 4, **fields: Any) -> BigramTrainer:
    if not (path / "config.json").exists():
        BigramModel.random(vocab, seed=seed).save(path)
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, **fields))
    return trainer


def random_group(
    draw: np.random.Generator,
    index: int,
    rewards: Sequence[float],
    *,
    tokens: tuple[int, int] = (0, 7),
    prompt: tuple[int, int] = (2, 5),
    sampled: tuple[int, int] = (1, 9),
    logprob: tuple[float, float] = (1.0, 3.0),
    **fields: Any,
) -> RolloutGroup:
    """Draw a group with these rewards; the pairs bound token ids, lengths and −log-probs, the upper bound excluded."""

    def ids(lengths: tuple[int, int]) -> list[int]:
        drawn: list[int] = draw.integers(*tokens, int(draw.integers(*lengths))).tolist()
        return drawn

    rollouts = tuple(
        rollout(reward=reward, prompt=ids(prompt), sampled=ids(sampled), logprob=-float(draw.uniform(*logprob)))
        for reward in rewards
    )
    return replace(group(index), rollouts=rollouts, **fields)
