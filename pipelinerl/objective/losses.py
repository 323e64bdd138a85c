"""`policy_loss`: an algorithm's loss and gradient from arrays of numpy, torch or JAX, without the rest of the system.

    from pipelinerl.objective import policy_loss

    result = policy_loss("grpo", logprobs, rewards=rewards, groups=groups, mask=mask, behavior_logprobs=sampled)
    result.loss.backward()              # torch; in JAX differentiate a function of logprobs that returns result.loss
    result.gradient                     # d loss / d logprobs in closed form, in all three libraries

Pass the whole batch: advantages and weights are computed over all its rollouts, on the host. The loss is evaluated in
the library of the log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from pipelinerl.arrays import Array, namespace, stop_gradient
from pipelinerl.errors import UserError
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import PartReward, Parts, Scored, TurnReward, Turns
from pipelinerl.objective.tokens import COMPUTED_BY

#: Names of the columns that a caller of `policy_loss` may pass as keyword arguments.
_COLUMNS: Final = tuple(name for name in COMPUTED_BY if name.endswith(("logprobs", "entropies")) or name == "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One rollout of a batch, with what is known about its reward and its N sampled tokens.

    Attributes:
        tokens: the text of each token, [N].
        reward, group, judged: the verdict's reward, the index of the group, and False if a verifier reached no verdict.
        behavior_logprobs: the sampler's log-probs, [N].
        logprobs: the current policy's log-probs, [N].
        old_logprobs, ref_logprobs, values: log-probs of π_old and π_ref and the critic's values, [N]; None if unknown.
        turns: the turns of an episode; empty for a single turn.
        parts: the terms of the reward; empty for a single term.
    """

    tokens: tuple[str, ...]
    reward: float
    group: int = 0
    judged: bool = True
    behavior_logprobs: tuple[float, ...]
    logprobs: tuple[float, ...]
    old_logprobs: tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    turns: tuple[TurnReward, ...] = ()
    parts: tuple[PartReward, ...] = ()


class PolicyLoss(NamedTuple):
    """The loss of a batch with its gradient, advantages and weights.

    Attributes:
        loss: −J, a scalar in the library of the log-probs, differentiable if the library differentiates.
        gradient: d loss / d logprobs, [B, T], in closed form. It lacks the gradient through measures of the whole
            distribution, such as the exact entropy.
        advantages, weights: f64 [B, T], on the host; `weights` are the token weights of the slot `agg`.
    """

    loss: Any
    gradient: Any
    advantages: np.ndarray
    weights: np.ndarray


def policy_loss(
    objective: str | Mapping[str, Any] | PolicyObjective,
    logprobs: Array,
    *,
    rewards: Any,
    groups: Any = None,
    mask: Any = None,
    judged: Any = None,
    max_tokens: int | None = None,
    turns: Turns | None = None,
    parts: Parts | None = None,
    **columns: Any,
) -> PolicyLoss:
    """Return loss and gradient of a batch of B rollouts, padded to T sampled tokens.

    Args:
        objective: a preset's name, a recipe's table (`{"preset": "grpo", "grad1": {"epsilon_high": 0.28}}`), or a
            resolved objective.
        logprobs: [B, T], of the current policy; they determine the library and the dtype of the loss.
        rewards: [B].
        groups: integers [B], equal for rollouts of the same problem; by default all rollouts form one group.
        mask: bool [B, T], tokens that the model sampled; by default all. Outside the mask, columns may hold any value.
        judged: bool [B], False if a verifier reached no verdict; such rollouts are excluded. By default all True.
        max_tokens: L_max, for an `agg.length` that refers to it (`dr_grpo`).
        turns, parts: each rollout's turns, for `adv.credit = "turns"`, and its rewards' parts, for `adv = "decoupled"`.
        columns: [B, T] each: `behavior_logprobs`, `old_logprobs`, `ref_logprobs`, `values`, `vocab_mean_logprobs`,
            `vocab_entropies`; in the library of the log-probs, or in numpy.

    Raises:
        ColumnError: the objective reads a column that is missing.
        UserError: shapes do not fit, a column is unknown, or the combination of slots makes no sense.
    """
    if not isinstance(objective, str | Mapping | PolicyObjective):
        raise UserError(f"objective must be a preset's name, a table or a PolicyObjective, got {objective!r}")
    chosen = objective if isinstance(objective, PolicyObjective) else resolve(objective, max_tokens=max_tokens)
    if len(logprobs.shape) != 2:
        raise UserError(f"logprobs must be [B, T], rollouts by tokens, got the shape {tuple(logprobs.shape)}")
    for name, column in {**columns, **({} if mask is None else {"mask": mask})}.items():
        if name not in (*_COLUMNS, "mask"):
            raise UserError(f"{name} is no column of an objective; expected any of {', '.join(_COLUMNS)}")
        if tuple(np.shape(column)) != tuple(logprobs.shape):
            raise UserError(f"{name} must have the shape of logprobs, {tuple(logprobs.shape)}, got {np.shape(column)}")
    num_rollouts, width = logprobs.shape
    inside = np.ones((num_rollouts, width), bool) if mask is None else _host(mask).astype(bool)
    valid = _per_rollout("judged", True if judged is None else judged, num_rollouts).astype(bool) & inside.any(axis=1)
    index = _per_rollout("groups", 0 if groups is None else groups, num_rollouts)
    lengths = inside.sum(axis=1)
    sampled = {name: _host(columns[name]).astype(np.float64)[inside] for name in chosen.late_columns if name in columns}
    scored = Scored(
        rewards=_per_rollout("rewards", rewards, num_rollouts).astype(np.float64),
        groups=index,
        lengths=lengths,
        valid=valid,
        turns=turns,
        parts=parts,
    )
    advantages = np.zeros(inside.shape)
    advantages[inside] = chosen.adv.advantages(scored, sampled)
    for name, column in chosen.grad2.choices(scored, sampled | {"advantages": advantages[inside]}).items():
        columns[name] = np.zeros(inside.shape)
        columns[name][inside] = column
    weights = chosen.agg.token_weights(lengths=lengths, groups=index, valid=valid)[:, None] * inside
    alike = {name: _like(logprobs, column) for name, column in columns.items()}
    alike |= {"advantages": _like(logprobs, advantages), "weights": _like(logprobs, weights)}
    table = {name: column.reshape(-1) for name, column in alike.items()} | {
        "loss_mask": _like(logprobs, inside & valid[:, None], exact=True).reshape(-1),
        "segment_ids": _like(logprobs, np.repeat(np.arange(num_rollouts), width), exact=True),
        "num_segments": num_rollouts,
    }
    current = logprobs.reshape(-1)
    gradient = chosen.prediction_gradient(stop_gradient(current), table)
    return PolicyLoss(chosen.evaluate(current, table), gradient.reshape(inside.shape), advantages, weights)


def rollouts_loss(
    objective: str | Mapping[str, Any] | PolicyObjective,
    rollouts: Sequence[ScoredRollout],
    *,
    max_tokens: int | None = None,
) -> PolicyLoss:
    """Return the `policy_loss` of rollouts in numpy float64, padded with 0 to [B, T]. Raises like `policy_loss`."""
    width = max((len(one.tokens) for one in rollouts), default=0)
    known = [name for name in ("logprobs", *_COLUMNS) if all(getattr(one, name, None) is not None for one in rollouts)]

    def padded(name: str) -> np.ndarray:
        return np.array([[*getattr(one, name), *[0.0] * (width - len(one.tokens))] for one in rollouts], np.float64)

    columns = {name: padded(name) for name in known}
    return policy_loss(
        objective,
        columns.pop("logprobs").reshape(len(rollouts), width),
        rewards=[one.reward for one in rollouts],
        groups=[one.group for one in rollouts],
        mask=np.array([np.arange(width) < len(one.tokens) for one in rollouts]).reshape(len(rollouts), width),
        judged=[one.judged for one in rollouts],
        max_tokens=max_tokens,
        turns=Turns.of([one.turns or (TurnReward(len(one.tokens)),) for one in rollouts]),
        parts=Parts.of([one.parts for one in rollouts], np.array([one.reward for one in rollouts], np.float64)),
        **columns,
    )


def _per_rollout(name: str, values: Any, num_rollouts: int) -> np.ndarray:
    array = _host(values)
    if array.ndim and array.shape != (num_rollouts,):
        raise UserError(f"{name} must have one entry for each of the {num_rollouts} rollouts, got {array.shape}")
    return np.broadcast_to(array, (num_rollouts,))


def _host(array: Any) -> np.ndarray:
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def _like(logprobs: Array, array: Any, *, exact: bool = False) -> Array:
    """Convert an array to the log-probs' library and device; unless `exact`, also to their dtype."""
    xp = namespace(logprobs)
    if xp.__name__ == "torch":
        tensor = xp.as_tensor(array, device=logprobs.device)
        return tensor if exact else tensor.to(logprobs.dtype)
    return xp.asarray(array) if exact else xp.asarray(array, dtype=logprobs.dtype)
