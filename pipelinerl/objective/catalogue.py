"""The named algorithms: each entry gives the objective's five terms (slots), and their source: paper and equation.

Where a paper and RLAX's appendix A differ, the entry follows the paper, and its note says so. The note also says if an
algorithm needs an extra forward pass. RLAX's sections and equations are numbered as in its English text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipelinerl.enums import NoSignal
from pipelinerl.objective.adv import (
    GAE,
    Advantage,
    Baseline,
    Constant,
    CovarianceClipped,
    Decoupled,
    GroupFiltered,
    GroupRelative,
    RewardToGo,
    RoleBaseline,
    Scale,
    Whitening,
)
from pipelinerl.objective.agg import Aggregation, Batch, Group, Length, Sequences, Trajectory
from pipelinerl.objective.grad1 import (
    ClippedRatio,
    DivergenceRatio,
    DualClippedRatio,
    GeometricRatio,
    LogProb,
    PolicyTerm,
    QuadraticRatio,
    SequenceRatio,
    SoftGate,
)
from pipelinerl.objective.grad2 import CovariancePenalty, Estimator, KLPenalty, LogBarrier, NoRegularizer, Regularizer
from pipelinerl.objective.is_weight import (
    GammaWeight,
    ImportanceWeight,
    Outside,
    SequenceWeight,
    TokenRatio,
    ToprWeight,
    Unweighted,
)
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy


@dataclass(frozen=True, slots=True)
class Preset:
    """A named algorithm: its `source`, how it differs (`note`), and its default for groups of equal rewards."""

    objective: PolicyObjective
    source: str
    note: str = ""
    no_signal: NoSignal = NoSignal.TRAIN


_MEAN: Final = GroupRelative(scale=Scale.NONE)


def _slots(
    agg: Aggregation,
    is_weight: ImportanceWeight,
    adv: Advantage,
    grad1: PolicyTerm,
    grad2: Regularizer = NoRegularizer(),
) -> PolicyObjective:
    return PolicyObjective(agg=agg, is_weight=is_weight, adv=adv, grad1=grad1, grad2=grad2)


_SCORE_FUNCTION: Final[Mapping[str, Preset]] = {
    "reinforce": Preset(
        _slots(Sequences(), SequenceWeight(), _MEAN, LogProb()),
        "Williams 1992; RLAX §2, Eq. 2, and appendix A",
        "Σ_t log π_θ(o_t) is log π_θ(o_i): the sum over tokens is the sequence's own term. The weight is the product "
        "of all ratios, without bounds.",
    ),
    "reinforce_token": Preset(
        _slots(Sequences(length=Length.MAX_TOKENS), TokenRatio(), _MEAN, LogProb()),
        "RLAX (Apple 2025) appendix A, Eq. 9: token-level REINFORCE",
        "agg.length is L_max: sampling.max_tokens, unless the recipe says a number.",
    ),
    "rloo": Preset(
        _slots(
            Sequences(), SequenceWeight(), GroupRelative(baseline=Baseline.LEAVE_ONE_OUT, scale=Scale.NONE), LogProb()
        ),
        "Kool et al. 2019 and Ahmadian et al. 2024 (RLOO); RLAX appendix A",
        "RLAX prints (G − 1)/G times this advantage, which is the group-mean baseline.",
    ),
    "pipelinerl": Preset(
        _slots(Sequences(), TokenRatio(), GroupRelative(), LogProb()),
        "PipelineRL's post (ServiceNow 2025): GRPO without trust region",
        "The number of sequences is the only denominator. is_weight.high = 5.0 truncates the ratio.",
    ),
    "cispo": Preset(
        _slots(Group(), TokenRatio(high=5.0), GroupRelative(), LogProb()),
        "MiniMax-M1 2025, Eq. 4 and 5; RLAX appendix A, Eq. 10",
        "The paper sets no lower bound in effect (§3.1) and does not publish 1 + ε_high; 5 is ScaleRL's (2025) choice. "
        "is_weight.low and is_weight.high are the bounds.",
    ),
    "llamarl": Preset(
        _slots(Sequences(), TokenRatio(high=4.0), _MEAN, LogProb()),
        "LlamaRL (Wu et al. 2025), AIPO: min(π_θ/μ, ρ)·A·∇log π_θ; RLAX appendix A",
        "is_weight.high is ρ, for which the paper recommends 2 to 10.",
    ),
    "topr": Preset(
        _slots(Sequences(), ToprWeight(), _MEAN, LogProb()),
        "Le Roux et al. 2025, Eq. 8: the canonical bounds a⁺ = b⁺ = b⁻ = 1, a⁻ = 0 of Eq. 7",
        "The paper's sign is the reward's, which is 1 or −1; here it is that of the reward less the group's mean (its "
        "baseline c), so that rewards of 0 and 1 have two signs. adv.baseline = 'none' takes the rewards as they are.",
    ),
    "agarwal": Preset(
        _slots(Sequences(length=Length.MAX_TOKENS), TokenRatio(), _MEAN, LogProb(), LogBarrier()),
        "Agarwal et al. 2021, Eq. 12: log barrier regularisation; RLAX appendix A, added to token-level REINFORCE",
        "grad2.beta is λ, which the paper leaves open. RLAX prints min{r, ρ} as this term; that is LlamaRL's weight "
        "(preset llamarl), and as a term to ascend it would favour whatever was sampled.",
    ),
}

_CLIPPED: Final[Mapping[str, Preset]] = {
    "ppo": Preset(
        _slots(Trajectory(), Unweighted(), GAE(), ClippedRatio()),
        "Schulman et al. 2017, Eq. 7, with the advantages of Schulman et al. 2016, Eq. 16; RLAX §2",
        "Needs a critic (values).",
    ),
    "ppo_dual_clip": Preset(
        _slots(Batch(), Unweighted(), GroupRelative(), DualClippedRatio()),
        "Dual-clip PPO (Ye et al. 2020, arXiv 1912.09729, Eq. 5), with groups as in GRPO",
        "grad1.ceiling is the paper's c, 3 there and in verl, which clips so by default.",
    ),
    "grpo": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), ClippedRatio()),
        "DeepSeekMath (Shao et al. 2024), Eq. 3; RLAX §4.2, Eq. 8, with β = 0",
        "grpo_kl is the same with the paper's penalty, which needs a reference.",
    ),
    "grpo_kl": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), ClippedRatio(), KLPenalty()),
        "DeepSeekMath (Shao et al. 2024), Eq. 3 and 4; RLAX §4.2, Eq. 8",
        "Needs the reference's log-probs. K3 is of π_ref/π_θ as in Eq. 4, not of r_{i,t} as RLAX prints.",
    ),
    "dapo": Preset(
        _slots(Group(), Unweighted(), GroupRelative(), ClippedRatio(epsilon_high=0.28)),
        "Yu et al. 2025, Eq. 8: clip-higher, token-level loss, dynamic sampling (§3.2); RLAX §4.2",
        "Groups of equal rewards are dropped and replaced: training.no_signal = 'filter' unless the recipe says "
        "otherwise. Its overlong reward shaping (Eq. 13) is a domain's: see objective.reward.",
        NoSignal.FILTER,
    ),
    "dr_grpo": Preset(
        _slots(Sequences(length=Length.MAX_TOKENS), Unweighted(), _MEAN, ClippedRatio()),
        "Liu et al. 2025, §3.2: neither length nor deviation divides; RLAX §4.2",
        "agg.length is L_max: sampling.max_tokens, unless the recipe says a number.",
    ),
    "gspo": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), SequenceRatio()),
        "Zheng et al. 2025, Eq. 5 to 7",
        "The clip range is the paper's (§5.1), two orders below PPO's, since it bounds a geometric mean.",
    ),
    "gmpo": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), GeometricRatio()),
        "Zhao et al. 2025, Algorithm 1, with the clip range (e^−0.4, e^0.4)",
    ),
    "gfpo": Preset(
        _slots(Group(), Unweighted(), GroupFiltered(), ClippedRatio()),
        "Shrivastava et al. 2025 §3, without KL and entropy term",
        "adv.keep rollouts of each group learn, the shortest ones; adv.metric = 'token_efficiency' prefers reward per "
        "token. The filtered ones stay in agg's denominator.",
    ),
    "reinforce_plus_plus": Preset(
        _slots(
            Trajectory(),
            Unweighted(),
            GroupRelative(scale=Scale.BATCH),
            ClippedRatio(),
            KLPenalty(beta=0.001, estimator=Estimator.K2),
        ),
        "Hu et al. 2025, REINFORCE++ with baseline, Eq. 11 and 12; RLAX §4.2",
        "Needs the reference's log-probs. Without groups: adv = { kind = 'reward_to_go', kl = 0.001, whitening = "
        "'batch' } and grad2 = 'none' (Eq. 8 to 10).",
    ),
    "decoupled_ppo": Preset(
        _slots(
            Batch(),
            TokenRatio(high=5.0, numerator=Policy.OLD, outside=Outside.MASK),
            RewardToGo(whitening=Whitening.BATCH),
            ClippedRatio(over=Policy.OLD),
        ),
        "AReaL (Fu et al. 2025), decoupled objective, after Hilton et al. 2022",
        "Needs log-probs recomputed at the step's own weights. Tokens whose π_old/μ exceeds is_weight.high are left "
        "out, as in AReaL's code; its advantages are GAE's with γ = λ = 1 and no critic, which is the return.",
    ),
}

#: The objectives that Yao et al. 2025 compare on PPO in their note on truncated importance sampling (TIS). They use the
#: group-relative advantage because it needs no critic.
_TIS: Final[Mapping[str, Preset]] = {
    "ppo_recomputed": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), ClippedRatio(over=Policy.OLD)),
        "Yao et al. 2025: PPO in a hybrid system, uncorrected",
        "Needs recomputed log-probs; μ is ignored.",
    ),
    "ppo_tis": Preset(
        _slots(
            Trajectory(), TokenRatio(high=2.0, numerator=Policy.OLD), GroupRelative(), ClippedRatio(over=Policy.OLD)
        ),
        "Yao et al. 2025: PPO with truncated importance sampling, min(π_old/μ, C)",
        "Needs recomputed log-probs. is_weight.high is C.",
    ),
    "ppo_vanilla_is": Preset(
        _slots(Trajectory(), TokenRatio(numerator=Policy.OLD), GroupRelative(), ClippedRatio(over=Policy.OLD)),
        "Yao et al. 2025, ablation: Vanilla-IS, the ratio π_old/μ without bound",
        "Needs recomputed log-probs.",
    ),
    "ppo_is": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), ClippedRatio(over=Policy.BEHAVIOR)),
        "Yao et al. 2025, ablation: PPO-IS, PPO's own ratio taken over μ",
        "The same five slots as grpo: on a sampler that differs numerically, clipping acts before any update.",
    ),
}

#: The algorithms published since the end of 2025, and DRO. Where a paper and its code differ, the note says so.
_RECENT: Final[Mapping[str, Preset]] = {
    "icepop": Preset(
        _slots(
            Trajectory(),
            TokenRatio(low=0.5, high=5.0, numerator=Policy.OLD, outside=Outside.MASK),
            GroupRelative(),
            ClippedRatio(over=Policy.OLD),
        ),
        "IcePop: Ring-1T (Ling Team 2025, arXiv 2510.18855), §2.3.2, without its KL term",
        "Needs recomputed log-probs. The text leaves [α, β] open; 0.5 and 5 are verl's. INTELLECT-3 (arXiv 2512.16144) "
        "masks π_θ/μ instead: is_weight.numerator = 'current' with grad1 = 'logprob' and agg = 'batch'.",
    ),
    "deepseek_v32": Preset(
        _slots(
            Trajectory(),
            Unweighted(),
            _MEAN,
            ClippedRatio(max_drift=0.5),
            KLPenalty(beta=0.001, estimator=Estimator.K3_WEIGHTED),
        ),
        "DeepSeek-V3.2 (2025, arXiv 2512.02556), §3.1: unbiased KL estimate (Eq. 7), off-policy sequence mask",
        "Needs the reference's log-probs. π_old is the inference engine's, as the text says of the mask. It gives "
        "neither δ (grad1.max_drift) nor β; both are TRL's.",
    ),
    "dppo_tv": Preset(
        _slots(Sequences(length=Length.MAX_TOKENS), Unweighted(), _MEAN, DivergenceRatio()),
        "DPPO-Binary-TV (Qi et al. 2026, arXiv 2602.04879)",
        "The thresholds and the denominator L_max are those of the authors' script. Their code writes the ratio as a "
        "stopped weight of log π_θ, truncated at 10000; the gradient is the same.",
    ),
    "prime_rl": Preset(
        _slots(
            Batch(),
            Unweighted(),
            _MEAN,
            DivergenceRatio(delta_low=0.2, delta_high=0.2),
            KLPenalty(beta=0.002, estimator=Estimator.K2, to=Policy.BEHAVIOR),
        ),
        "prime-rl's default loss of August 2026 (trainer/rl/loss.py): DPPO-TV, and a KL penalty after Kimi-K2.5",
        "kl_tau·log²(π_θ/μ) is K2 with beta = 2·kl_tau. prime-rl's page prints min(π_θ/μ, δ)·A; its code masks "
        "instead, and this preset follows the code.",
    ),
    "sapo": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), SoftGate()),
        "Soft Adaptive Policy Optimization (Qwen 2025, arXiv 2511.20347)",
        "grad1.positive and grad1.negative are τ_pos and τ_neg.",
    ),
    "cfpo": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), QuadraticRatio()),
        "Çağatan et al. 2026 (arXiv 2601.22801), Eq. 7 and 8, with β = 0",
    ),
    "luspo": Preset(
        _slots(Sequences(), Unweighted(), GroupRelative(), SequenceRatio(epsilon_low=2e-3, epsilon_high=2.5e-3)),
        "Liu et al. 2026 (arXiv 2602.05261): GSPO with each sequence times its length; clip range of §5.1",
        "The weight 1/B of each of a sequence's |o_i| tokens is the factor |o_i|.",
    ),
    "vespo": Preset(
        _slots(Batch(), GammaWeight(), GroupRelative(), LogProb()),
        "Shen et al. 2026 (arXiv 2602.10693), §3.4, with the coefficients of the authors' code",
        "The text's expectation is over sequences; the authors' scripts divide by the batch's tokens, as here.",
    ),
    "sao": Preset(
        _slots(Batch(), TokenRatio(low=0.7, high=6.0, outside=Outside.MASK), GAE(), LogProb()),
        "SAO's direct double-sided importance sampling (Hou et al. 2026, arXiv 2607.07508), §3.1",
        "Needs a critic (values). The range is the paper's for reasoning; for code it is [0.2, 4]. The text prints no "
        "stop-gradient on the ratio; it is taken as a weight. The schedule of critic updates is not part of this.",
    ),
    "maxrl": Preset(
        _slots(Sequences(), TokenRatio(), GroupRelative(scale=Scale.MEAN), LogProb()),
        "Maximum likelihood RL (Tajwar et al. 2026, arXiv 2602.02710): the mean over successes, less the mean of all",
        "For rewards of 0 and 1. The paper is on-policy; is_weight corrects the rest. A group without success is "
        "dropped, as by the estimator that the paper analyses; its code pushes such a group down by 1/G.",
    ),
    "gdpo": Preset(
        _slots(Trajectory(), Unweighted(), Decoupled(), ClippedRatio()),
        "Liu et al. 2026 (arXiv 2601.05242), on GRPO's surrogate",
        "Reads the parts of a domain's rewards. The text normalises over the rollouts of a batch, as here; the "
        "authors' verl code over its tokens.",
    ),
    "rae": Preset(
        _slots(Sequences(length=Length.MAX_TOKENS), Unweighted(), RoleBaseline(), ClippedRatio()),
        "Role-conditioned advantage estimation: SPIRAL (Liu et al. 2025, arXiv 2506.24119)",
        "Follows the authors' code: the baseline before its update, PPO's clip, and Dr. GRPO's denominator; the text "
        "prints REINFORCE, and was read in summaries alone. The baselines are part of checkpoints.",
    ),
    "clip_cov": Preset(
        _slots(Batch(), Unweighted(), CovarianceClipped(), ClippedRatio(over=Policy.OLD)),
        "Clip-Cov (Cui et al. 2025, arXiv 2505.22617), with the authors' code's values",
        "Needs recomputed log-probs. Covariances are those of the whole batch at the weights from which the step "
        "starts; the authors' code takes each micro-batch at the current weights, without tokens that PPO clips.",
    ),
    "kl_cov": Preset(
        _slots(
            Batch(),
            Unweighted(),
            GroupRelative(),
            ClippedRatio(epsilon_low=math.inf, epsilon_high=math.inf, over=Policy.OLD),
            CovariancePenalty(),
        ),
        "KL-Cov (Cui et al. 2025, arXiv 2505.22617), with the authors' code's values",
        "Needs recomputed log-probs. Covariances as in clip_cov. The text names a KL penalty; the code takes "
        "|log π_θ − log π_old|, as here, whose slope is 0 until training.epochs or training.mini_batches move π_θ.",
    ),
    "dro": Preset(
        _slots(
            Batch(), Unweighted(), _MEAN, LogProb(), KLPenalty(beta=0.05, estimator=Estimator.K2, to=Policy.BEHAVIOR)
        ),
        "Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107), as in Tinker and verl",
        "The text squares the log-ratio of whole sequences to a reference and learns a value; the codes square that of "
        "each token to the sampler, as here, with the group's mean as the value (Kimi K1.5). beta is Tinker's example.",
    ),
    "on_policy_distillation": Preset(
        _slots(Batch(), TokenRatio(), Constant(value=0.0), LogProb(), KLPenalty(beta=1.0, estimator=Estimator.K2)),
        "Thinking Machines 2025, On-Policy Distillation: reverse KL to a teacher on the student's own tokens",
        "Needs the reference's log-probs: [reference] path or url is the teacher. Rewards are not read. The gradient "
        "of K2 is that of sg[log π_ref − log π_θ]·log π_θ. prime-rl's code also drops tokens that became less likely "
        "by 0.2.",
    ),
}

PRESETS: Final[Mapping[str, Preset]] = {**_SCORE_FUNCTION, **_CLIPPED, **_TIS, **_RECENT}

DEFAULT: Final = "pipelinerl"
