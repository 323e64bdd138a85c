"""Compare what runs learn per second under mode `auto`, on policy and with fixed lags, with many seeds.

The learning is real: a bigram model, the trainer and objective of the project, group by group with the weights that
sampled each answer. The time is simulated, since seconds of a shared machine would need far more seeds. A run answers
prompts of one token with eight; the reward is the share of tokens that follow the right one. The time of an answer is
drawn as in a cell of `simulated_grid`. The held-out reward is exact: the mean over all prompts under the model's own
distribution.

The best fixed arm of a cell is the one with the least median time on other seeds. A ratio compares arms of one seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Row, bootstrap_median, print_table, read_record, write_record
from benchmarks.simulated_grid import FIXED, Cell, run_of
from pipelinerl import rng
from pipelinerl.numerics.logprobs import log_softmax
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.simulation.engine import SimulatedGroup
from pipelinerl.plugins.simulation.simulator import simulated_steps
from pipelinerl.training.batch import BatchRules, build
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.step import Step
from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn, Verdict, VersionSpan
from trainer_contract.types import OptimizerSpec, TrainerSpec

Floats = NDArray[np.float64]

CELLS: Final = (
    Cell("log-normal", "balanced", 8, 0.1),
    Cell("heavy", "trainer-bound", 8, 0.1),
    Cell("equal", "shared", 2, 0.01),
)
#: Optimizer steps of a run, and the held-out reward whose time counts.
STEPS: Final = 150
TARGET: Final = 0.8
_VOCAB: Final = 24
_LENGTH: Final = 8
_RATE: Final = 0.06
#: The objective of the recipe `tiny`.
OBJECTIVE: Final = {
    "preset": "pipelinerl",
    "adv": {"scale": "none"},
    "is_weight": "one",
    "grad1": {"kind": "clipped_ratio", "epsilon_low": 0.2, "epsilon_high": 0.28},
}
_SEEDS: Final = 16
#: Seeds of the runs that choose the best fixed arm.
_CHOOSING: Final = range(1000, 1004)


class Learner:
    """A bigram model that learns which token follows which, with the weights of all versions that may have sampled."""

    def __init__(self, seed: int) -> None:
        generator = rng.generator(seed, "learning", "task")
        self._right = generator.permutation(_VOCAB)
        self._noise = rng.generator(seed, "learning", "answers")
        self._objective: PolicyObjective = resolve(OBJECTIVE, max_tokens=_LENGTH)
        trainer = BigramTrainer()
        with tempfile.TemporaryDirectory() as folder:
            BigramModel.random(_VOCAB, seed=seed, scale=0.5).save(Path(folder))
            trainer.init_worker(TrainerSpec(model_path=Path(folder), optimizer=OptimizerSpec()))
        self._step = Step(rules=BatchRules(token_budget=8192), passes=ForwardPasses(policy=trainer))
        self._versions = [self._table()]
        self.held_out = [self._held_out()]

    def __call__(self, groups: Sequence[SimulatedGroup]) -> float:
        """Take a step on answers to these groups; return the effective sample size of its weights."""
        batch = build(
            [self._sampled(group) for group in groups],
            self._step.rules,
            objective=self._objective,
            producing=len(self._versions),
        )
        result = self._step.apply(self._step.accumulate(batch), learning_rates=[_RATE])
        self._versions.append(self._table())
        self.held_out.append(self._held_out())
        return result.figures["ess"]

    def _table(self) -> Floats:
        """Return the log-probs [V, V] of the trainer's weights."""
        (_, weights), *_ = self._step.policy.gather_weights()
        logits = np.asarray(weights, np.float64).reshape(_VOCAB, _VOCAB)
        return np.asarray(log_softmax(logits, np.ones(_VOCAB)), np.float64)

    def _sampled(self, group: SimulatedGroup) -> RolloutGroup:
        prompt = int(self._noise.integers(_VOCAB))
        versions = [version for version, count in sorted(group.versions.items()) for _ in range(count)]
        return RolloutGroup(
            group_id=f"prompt-{group.index:06d}",
            index=group.index,
            domain="learning",
            actor="actor-0",
            rollouts=tuple(self._answer(prompt, version) for version in versions),
        )

    def _answer(self, prompt: int, version: int) -> Rollout:
        table, noise = self._versions[version], self._noise.gumbel(size=(_LENGTH, _VOCAB))
        tokens, at = [], prompt
        for each in noise:
            tokens.append(int(np.argmax(table[at] + each)))
            at = tokens[-1]
        before = np.array([prompt, *tokens[:-1]])
        reward = float(np.mean(self._right[before] == tokens))
        turn = Turn(
            context_token_ids=np.array([prompt], np.int32),
            token_ids=np.array(tokens, np.int32),
            behavior_logprobs=table[before, tokens].astype(np.float32),
            spans=(VersionSpan(version, _LENGTH),),
        )
        verdict = Verdict(outcome=Outcome.CORRECT if reward == 1 else Outcome.PARTIAL, reward=reward)
        return Rollout(turns=(turn,), verdict=verdict, finish_reason="length", temperature=1.0)

    def _held_out(self) -> float:
        """Return the expected reward, over all prompts and answers."""
        chances = np.exp(self._versions[-1])
        right, at, total = chances[np.arange(_VOCAB), self._right], np.full(_VOCAB, 1 / _VOCAB), 0.0
        for _ in range(_LENGTH):
            total += float(at @ right)
            at = at @ chances
        return total / _LENGTH


def run(quick: bool = False, *, seeds: Sequence[int] = range(_SEEDS)) -> None:
    """Train each arm with each seed in each cell; print and record the seconds to the target.

    Cells in the record are kept.
    """
    seeds = list(seeds)[: 2 if quick else None]
    kept = [] if quick else read_record("learning_by_lag").get("cells", [])
    cells = [each for each in kept if each["cell"] in map(list, CELLS)]
    for cell in CELLS[: 1 if quick else None]:
        if list(cell) not in [each["cell"] for each in cells]:
            cells.append(compared(cell, seeds))
            write_record("learning_by_lag", {"cells": cells}, quick=quick)
    rows = [
        Row(f"{', '.join(map(str, each['cell']))}: auto ÷ {arm}", ratio, "<= 1.05", ratio.low <= 1.05)
        for each in cells
        for arm, ratio in ((arm, bootstrap_median(values)) for arm, values in each["ratios"].items())
    ]
    print_table(f"seconds to a held-out reward of {TARGET:g}: auto ÷ on policy, and ÷ the best fixed arm", rows)


def compared(cell: Cell, seeds: Sequence[int]) -> dict[str, Any]:
    """Return a cell's best fixed arm by other seeds, and the ratios of auto to that arm and to on policy by seed."""
    choosing = {arm: [seconds_to(cell, arm, seed) for seed in _CHOOSING[: len(seeds)]] for arm in FIXED}
    best = min(FIXED, key=lambda arm: median(choosing[arm]))
    auto = [seconds_to(cell, "auto", seed) for seed in seeds]
    ratios = {
        arm: [ours / seconds_to(cell, arm, seed) for ours, seed in zip(auto, seeds, strict=True)]
        for arm in dict.fromkeys(["on policy", best])
    }
    return {
        "cell": list(cell),
        "seeds": list(seeds),
        "best": best,
        "choosing": choosing,
        "auto": auto,
        "ratios": ratios,
    }


def seconds_to(cell: Cell, arm: str, seed: int, *, steps: int = STEPS) -> float:
    """Return the simulated seconds until the held-out reward reaches `TARGET`. Raises ValueError if it does not."""
    setting, hardware = run_of(cell, seed, steps=steps)
    if arm != "auto":
        bounds, ahead = FIXED[arm]
        setting = replace(setting, bounds=bounds, steps_ahead=ahead, auto_j=False)
    learner = Learner(seed)
    simulated = simulated_steps(setting, hardware, learner)
    for step, reward in zip(simulated, learner.held_out[1:], strict=True):
        if reward >= TARGET:
            return step.ended
    raise ValueError(f"{arm} with seed {seed} does not reach {TARGET} in {steps} steps but {learner.held_out[-1]:.2f}")
