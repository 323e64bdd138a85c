"""Metrics of the difference between engine and trainer log-probs, by cause, equal a plain loop and manual values."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.numerics.causes import figures, mismatch, sampled_tokens
from trainer_contract.types import MicroBatch


def test_logprob_mismatch_of_no_tokens_is_zero_and_arrays_of_different_shapes_are_rejected():
    nothing = mismatch(np.zeros(0), np.zeros(0))
    assert (nothing.num_tokens, nothing.max, nothing.k3, nothing.ess) == (0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="expected log-probs of the same tokens"):
        mismatch(np.zeros(2), np.zeros(3))


HELD = 9


@dataclass(frozen=True)
class Token:
    """One token for the plain loop, with its log-probs; `version` is None for tokens that the environment wrote."""

    version: int | None
    behavior: float = 0.0
    current: float = 0.0
    old: float = 0.0


def micro_batch(rollouts):
    """Return a micro-batch of the tokens and the trainer's log-probs, which are arbitrary outside the loss mask."""
    tokens = [token for rollout in rollouts for token in rollout]
    sampled = np.array([token.version is not None for token in tokens])
    lengths = [len(rollout) for rollout in rollouts]

    def column(name):
        return np.array([getattr(token, name) for token in tokens], np.float32)

    batch = MicroBatch(
        token_ids=np.zeros(len(tokens), np.int32),
        position_ids=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        loss_mask=sampled,
        advantages=column("current"),
        weights=column("current"),
        behavior_logprobs=column("behavior"),
        temperatures=np.ones(len(tokens), np.float32),
        old_logprobs=column("old"),
        behavior_versions=np.array([token.version or 0 for token in tokens], np.int32),
        num_segments=len(rollouts),
    )
    return batch, np.where(sampled, column("current"), np.float32(-7.0))


def random_rollouts(seed, count):
    """Return rollouts of one to three turns; the model version sometimes increases in a rollout, at most to HELD."""
    draw = rng.generator(seed, "causes")
    rollouts = []
    for _ in range(count):
        version, rollout = int(draw.integers(HELD - 6, HELD + 1)), []
        for _ in range(int(draw.integers(1, 4))):
            rollout += [Token(None)] * int(draw.integers(1, 4))
            for _ in range(int(draw.integers(1, 6))):
                version = min(HELD, version + int(draw.integers(0, 3)) // 2)
                behavior = float(-draw.exponential())
                current, old = (min(0.0, behavior + float(draw.normal(0, 0.5))) for _ in range(2))
                rollout.append(Token(version, behavior, current, old))
        rollouts.append(rollout)
    return rollouts


def slow_causes(rollouts):
    """Return the sampled tokens by the cause of their mismatch: for each cause, a list of tokens per rollout."""
    by_cause = {"numerics": [], "cache": [], "staleness": []}
    for rollout in rollouts:
        of = defaultdict(list)
        begun_by = None
        for token in rollout:
            if token.version is None:
                begun_by = None
                continue
            begun_by = token.version if begun_by is None else begun_by
            if token.version != HELD:
                of["staleness"].append(token)
            else:
                of["numerics" if begun_by == HELD else "cache"].append(token)
        for cause, tokens in of.items():
            by_cause[cause].append(tokens)
    return by_cause


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reference", ["current", "old"])
def test_logprob_mismatch_metrics_by_cause_agree_with_a_loop_over_tokens(seed, reference):
    rollouts = random_rollouts(seed, 20)
    (first, one), (second, two) = micro_batch(rollouts[:7]), micro_batch(rollouts[7:])
    sampled = sampled_tokens([first, second], [one, two])
    assert sampled is not None
    got = figures(sampled, held_version=HELD, cuts={})
    prefix = "mismatch" if reference == "current" else "old_mismatch"
    total = sum(token.version is not None for rollout in rollouts for token in rollout)
    for cause, responses in slow_causes(rollouts).items():
        tokens = [token for response in responses for token in response]
        assert tokens, "every cause must occur"
        difference = np.array([getattr(token, reference) - token.behavior for token in tokens])
        probabilities = [
            np.array([abs(np.exp(getattr(t, reference)) - np.exp(t.behavior)) for t in response])
            for response in responses
        ]
        ratio = np.exp(difference)
        expected = {
            "share": len(tokens) / total,
            "mean": np.abs(difference).mean(),
            "p50": np.quantile(np.abs(difference), 0.5),
            "p95": np.quantile(np.abs(difference), 0.95),
            "max": np.abs(difference).max(),
            "k1": -difference.mean(),
            "k3": (ratio - 1 - difference).mean(),
            "ess": ratio.sum() ** 2 / len(tokens) / (ratio**2).sum(),
            "response_max": np.mean([each.max() for each in probabilities]),
            "response_mean": np.mean([each.mean() for each in probabilities]),
            "contradictions": np.mean([each.max() > 0.5 for each in probabilities]),
        }
        here = f"{prefix}_{cause}_"
        metrics = {name.removeprefix(here): value for name, value in got.items() if name.startswith(here)}
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_shares_of_clipped_tokens_by_token_age_match_manual_values():
    ages = [1, 1, 2, 3, 4, 5, 8, 9, 16, 17]  # of tokens in the step that makes version HELD + 21
    batch, logprobs = micro_batch([[Token(None), *(Token(HELD + 21 - age) for age in ages)]])
    clipped = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0, 1], bool)
    got = figures(sampled_tokens([batch], [logprobs]), held_version=HELD + 20, cuts={"clipped": clipped})
    shares = {"1": 2, "2": 1, "3_4": 2, "5_8": 2, "9_16": 2, "17_32": 1}
    assert {name: got[f"age_{name}_share"] for name in shares} == pytest.approx({a: n / 10 for a, n in shares.items()})
    cut = {"1": 0.5, "2": 0.0, "3_4": 0.5, "5_8": 1.0, "9_16": 0.0, "17_32": 1.0}
    assert {name: got[f"age_{name}_clipped"] for name in cut} == pytest.approx(cut)
    assert sum(name.startswith("age_") for name in got) == 2 * len(shares)


def test_logprob_mismatch_metrics_that_need_missing_versions_or_old_logprobs_are_omitted():
    batch, logprobs = micro_batch([[Token(None), Token(HELD, -1.0, -1.1)]])
    idle = replace(batch, loss_mask=np.zeros(2, bool))
    assert sampled_tokens([], []) is None and sampled_tokens([idle], [logprobs]) is None
    assert sampled_tokens([replace(batch, behavior_versions=None)], [logprobs]) is None
    assert figures(None, held_version=HELD, cuts={}) == {}
    bare = sampled_tokens([replace(batch, old_logprobs=None)], [logprobs])
    names = figures(bare, held_version=HELD, cuts={}).keys()
    assert {name.rsplit("_", 1)[0] for name in names} >= {"mismatch_numerics", "age_1"}
    assert not any("old" in name or "staleness" in name or "cache" in name for name in names)
