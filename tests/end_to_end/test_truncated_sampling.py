"""Top-p and top-k while training: engine, actor, packing, objective and trainer agree with an oracle in float64.

The data are on-policy: the same weights sample and train.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pipelinerl.actor.rollouts import Answer, rollouts_of
from pipelinerl.actor.single_turn import chat_request
from pipelinerl.numerics.causes import figures, sampled_tokens
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.statistics import statistics, trained_tokens
from pipelinerl.plugins.bigram.engine import from_options
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.training.packing import WeightedRollout, pack
from pipelinerl.types import Outcome, Sampling, Verdict
from tests.fakes.engine_options import engine_options
from tests.fakes.talking_sampler import order
from trainer_contract.types import OptimizerSpec, TrainerSpec

SAMPLES = 64
TRUNCATED = {
    "top_p": Sampling(num_samples=SAMPLES, max_tokens=12, top_p=0.9),
    "half": Sampling(num_samples=SAMPLES, max_tokens=12, top_p=0.5, temperature=0.7),
    "top_k": Sampling(num_samples=SAMPLES, max_tokens=12, top_k=3, temperature=1.3),
    "both": Sampling(num_samples=SAMPLES, max_tokens=12, top_k=20, top_p=0.8),
}


#: Sampling that keeps every token: its log-probs are the policy's without a correction.
WHOLE = {
    "cold": Sampling(num_samples=SAMPLES, max_tokens=12, temperature=0.3),
    "hot": Sampling(num_samples=SAMPLES, max_tokens=3, temperature=2.0, stop=("e", "ab")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("truncated"), char_tokenizer()
    tokenizer.save_pretrained(path)
    BigramModel.random(len(tokenizer), seed=3, scale=1.5, context_length=256).save(path)
    return path


async def _answered(model, asked, *, of_policy=True):
    engine = from_options(engine_options(model_path=model, slots=SAMPLES, context_length=256))
    await engine.start()
    request = chat_request(asked)
    assert request.policy_logprobs == asked.sampling.truncates
    answer = await engine.complete(request if of_policy else request.model_copy(update={"policy_logprobs": False}))
    await engine.close()
    return answer


def packed(model, sampling, *, of_policy=True):
    """Return the sampled answers as one micro-batch; the advantages alternate between 1 and -1."""
    asked = replace(order(samples=SAMPLES), sampling=sampling)
    answer = asyncio.run(_answered(model, asked, of_policy=of_policy))
    verdict = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    rollouts = [made.rollout for made in rollouts_of(asked, [Answer(answer, each, verdict) for each in answer.choices])]
    weighted = [
        WeightedRollout(
            rollout=rollout, advantages=np.full(rollout.num_sampled_tokens, (-1.0) ** number), token_weight=0.01
        )
        for number, rollout in enumerate(rollouts)
    ]
    (only,) = pack(weighted, token_budget=1 << 20)
    return only.micro_batch


@dataclass(frozen=True)
class Oracle:
    """The distributions from which each trained token was drawn, by the definitions of top-k and top-p, in float64.

    `policy` [N, V] is before truncation, `sampled_from` [N, V] after it, and `kept_mass` [N] the sum of the kept
    tokens' probabilities.
    """

    previous: NDArray[np.int32]
    tokens: NDArray[np.int32]
    policy: NDArray[np.float64]
    sampled_from: NDArray[np.float64]
    kept_mass: NDArray[np.float64]


def oracle_of(model, batch, sampling):
    where = np.flatnonzero(batch.loss_mask)
    previous, tokens = batch.token_ids[where - 1], batch.token_ids[where]
    logits = BigramModel.load(model).logits.astype(np.float64)[previous] / sampling.temperature
    policy = np.exp(logits - logits.max(1, keepdims=True))
    policy /= policy.sum(1, keepdims=True)
    kept = np.zeros(policy.shape, bool)
    for row, probabilities in enumerate(policy):
        likeliest = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
        share = np.cumsum(probabilities[likeliest]) / probabilities[likeliest].sum()
        kept[row, likeliest[: int(np.searchsorted(share, sampling.top_p)) + 1]] = True
    mass = (policy * kept).sum(1)
    return Oracle(previous, tokens, policy, policy * kept / mass[:, None], mass)


def gradient_of(model, batch, folder):
    """Return d loss / d table of GRPO, which the optimizer's first moment equals if it forgets the past."""
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model, optimizer=OptimizerSpec(betas=(0.0, 0.9), grad_clip=0.0)))
    trainer.backward([batch], resolve("grpo"))
    trainer.optimizer_step(learning_rate=0.0)
    trainer.save_state(folder)
    (state,) = folder.glob("*.safetensors")
    return load_file(state)["exp_avg"]


def forward(model, batch):
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model))
    return trainer.forward([batch])[0]


def statistics_of(model, batch, preset="grpo"):
    logprobs = forward(model, batch)
    return statistics(resolve(preset), trained_tokens([replace(batch, old_logprobs=logprobs)], [logprobs]))


#: Presets by the policies that their ratios compare: π_θ/μ per token and per sequence, π_θ/π_old and π_old/μ.
RATIOS = ("grpo", "gspo", "cispo", "topr", "ppo_recomputed", "ppo_tis", "icepop", "dppo_tv")


@pytest.mark.parametrize("sampling", (TRUNCATED | WHOLE).values(), ids=TRUNCATED | WHOLE)
def test_ratio_of_on_policy_samples_is_one_and_nothing_is_clipped(model, sampling):
    batch = packed(model, sampling)
    for preset in RATIOS:
        step = statistics_of(model, batch, preset)
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert step["clip_fraction"] == 0.0, preset
    assert statistics_of(model, batch, "ppo_tis")["truncated_fraction"] == 0.0


@pytest.mark.parametrize("sampling", TRUNCATED.values(), ids=TRUNCATED)
def test_gradient_on_truncated_samples_is_that_of_an_oracle_which_knows_the_truncated_distribution(
    model, sampling, tmp_path
):
    batch = packed(model, sampling)
    oracle, rows = oracle_of(model, batch, sampling), np.arange(int(batch.loss_mask.sum()))
    drawn = oracle.sampled_from[rows, oracle.tokens]
    assert drawn.min() > 0, "a dropped token was sampled"
    assert oracle.kept_mass.min() < 0.95, "nothing was truncated"
    behavior = np.log(drawn) + np.log(oracle.kept_mass)
    np.testing.assert_allclose(batch.behavior_logprobs[batch.loss_mask], behavior, atol=1e-6)
    # d loss / d log π_θ of GRPO is −w·A·r where PPO does not clip, and r is the oracle's policy over the behavior.
    ratio = oracle.policy[rows, oracle.tokens] / np.exp(behavior)
    outer = -(batch.weights * batch.advantages)[batch.loss_mask].astype(np.float64) * ratio / sampling.temperature
    by_token = -oracle.policy * outer[:, None]
    by_token[rows, oracle.tokens] += outer
    expected = np.zeros((oracle.policy.shape[1],) * 2)
    np.add.at(expected, oracle.previous, by_token)
    np.testing.assert_allclose(gradient_of(model, batch, tmp_path), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("sampling", TRUNCATED.values(), ids=TRUNCATED)
def test_mismatch_of_logprobs_after_truncation_has_the_cause_truncation(model, sampling):
    for of_policy, cause, other in ((True, "numerics", "truncation"), (False, "truncation", "numerics")):
        batch = packed(model, sampling, of_policy=of_policy)
        step = figures(sampled_tokens([batch], [forward(model, batch)]), held_version=0, cuts={})
        expected = 0.0 if of_policy else -float(np.log(oracle_of(model, batch, sampling).kept_mass).mean())
        assert step[f"mismatch_{cause}_mean"] == pytest.approx(expected, abs=1e-5)
        assert not any(other in name for name in step)
