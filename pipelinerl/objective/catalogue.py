"""The named algorithms: each entry gives the five slots, the paper and the equation they come from.

Where a paper and RLAX's appendix A differ, the entry follows the paper and its note says so. RLAX's sections and
equations are numbered as in its English text. Values that depend on a run (L_max, a cap, β) have defaults that a recipe
can change. A preset needs an extra forward pass only if its entry says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from pipelinerl.enums import NoSignal
from pipelinerl.objective.adv import (
    GAE,
    Advantage,
    Baseline,
    GroupFiltered,
    GroupRelative,
    RewardToGo,
    Scale,
    Whitening,
)
from pipelinerl.objective.agg import Aggregation, Batch, Group, Length, Sequences, Trajectory
from pipelinerl.objective.grad1 import ClippedRatio, GeometricRatio, LogProb, PolicyTerm, SequenceRatio
from pipelinerl.objective.grad2 import Estimator, KLPenalty, LogBarrier, NoRegularizer, Regularizer
from pipelinerl.objective.is_weight import (
    ImportanceWeight,
    Outside,
    SequenceWeight,
    TokenRatio,
    ToprWeight,
    Unweighted,
)
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy


@final
@dataclass(frozen=True, slots=True)
class Preset:
    """A named algorithm.

    Attributes:
        objective: the five slots.
        source: the paper and the equation.
        note: remarks for a reader of the paper.
        no_signal: default treatment of groups with equal rewards, if the recipe does not set it.
    """

    objective: PolicyObjective
    source: str
    note: str = ""
    no_signal: NoSignal = NoSignal.TRAIN


_MEAN: Final = GroupRelative(scale=Scale.NONE)
_OLD_OVER_BEHAVIOR: Final = TokenRatio(numerator=Policy.OLD)


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
        "Agarwal et al. 2021, Eq. 12: log barrier regularisation; RLAX appendix A, beside token-level REINFORCE",
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

#: The objectives that the TIS note (Yao et al. 2025) compares on PPO. They use the group-relative advantage, which
#: needs no critic; any advantage would do.
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
        _slots(Trajectory(), _OLD_OVER_BEHAVIOR, GroupRelative(), ClippedRatio(over=Policy.OLD)),
        "Yao et al. 2025, ablation: Vanilla-IS, the ratio π_old/μ without bound",
        "Needs recomputed log-probs.",
    ),
    "ppo_is": Preset(
        _slots(Trajectory(), Unweighted(), GroupRelative(), ClippedRatio(over=Policy.BEHAVIOR)),
        "Yao et al. 2025, ablation: PPO-IS, PPO's own ratio taken over μ",
        "The same five slots as grpo: on a sampler that differs numerically, clipping acts before any update.",
    ),
}

PRESETS: Final[Mapping[str, Preset]] = {**_SCORE_FUNCTION, **_CLIPPED, **_TIS}

DEFAULT: Final = "pipelinerl"
