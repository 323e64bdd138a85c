"""Enums for recipe settings that several packages need, declared once."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: The lowest and highest temperature that every engine supports; a lower one would divide logits by almost zero.
COLDEST: Final = 1e-5
HOTTEST: Final = 100.0


class WeightFormat(StrEnum):
    """Format in which an engine stores linear layers; all other weights keep the model's dtype."""

    NATIVE = "native"
    """The model's dtype."""
    INT8 = "int8"
    """Eight-bit weights with a scale per output channel, and eight-bit activations with a scale per token."""
    INT4 = "int4"
    """Weights rounded to four bits, for experiments; stored and multiplied like `int8`, without savings."""


class VerifierLocation(StrEnum):
    """The processes that judge the answers of a run."""

    ACTORS = "actors"
    """Each actor's own verifier processes."""
    SERVICES = "services"
    """Verifier services, started by the launcher or by a user, on any machine."""


class Receiver(StrEnum):
    """The process that joins the weight group and receives an engine's weights; some engine types have no choice."""

    IN_PROCESS = "in_process"
    """The engine's process: nothing is copied, but a peer that sends more than announced ends the engine."""
    OWN_PROCESS = "own_process"
    """A separate process that may crash without ending the engine; for networks with untrusted peers."""


class OldLogprobs(StrEnum):
    """Source of `old_logprobs`, the denominator of PPO's ratio.

    With in-flight updates, up to k + 1 versions sample the tokens of a batch, or even of one rollout; k is the
    staleness bound. "The old policy" then means either the weights that sampled a token or the weights at the start of
    the step. In lockstep (k = 1, and engines reload after every step), both are the same.
    """

    SAMPLING_WEIGHTS = "sampling_weights"
    """A forward pass with the weights that sampled each token (RLAX §5.1); a `WeightHistory` keeps these weights.

    The ratio old/behavior then measures numerics (and reused KV caches), current/old measures all of the staleness.
    """
    RECOMPUTE = "recompute"
    """A forward pass with the weights at the start of the step.

    This is the proximal policy of decoupled PPO (Hilton et al. 2022; AReaL). old/behavior then measures staleness
    and numerics, and current/old begins at 1.
    """
    BEHAVIOR = "behavior"
    """The log-probs that the engine returned when it sampled the tokens, without a further forward pass."""


class RoutingReplay(StrEnum):
    """Choice of the experts that compute each token in the trainer, for mixture-of-experts models."""

    OFF = "off"
    """The experts that the trainer's own routers choose."""
    ROLLOUT = "rollout"
    """The experts that the sampler used: rollout routing replay, R3 (Ma et al. 2025)."""


class NoSignal(StrEnum):
    """The treatment of groups whose rewards are all equal."""

    TRAIN = "train"
    """Keep such groups, so that a step reflects the mixture of problems as it is."""
    FILTER = "filter"
    """Drop such groups and wait for others: dynamic sampling (DAPO §3.2)."""


class Truncated(StrEnum):
    """The treatment of rollouts cut off by the token limit, whose verdict says little about their quality."""

    TRAIN = "train"
    """Train on such rollouts; a soft length penalty may be added (`domains.reward.overlong_tokens`)."""
    MASK = "mask"
    """Exclude all tokens of such rollouts from the loss: overlong filtering (DAPO §3.4)."""


class StalenessScope(StrEnum):
    """The unit that is dropped if one token is too old."""

    GROUP = "group"
    """The whole group, since advantages are computed over all samples of a problem."""
    ROLLOUT = "rollout"
    """Only the rollout. If two or more rollouts of the group remain, they train, with their own mean as baseline."""


class Overdue(StrEnum):
    """The treatment of a group that is still being sampled at the last step that could accept it."""

    DROP = "drop"
    """Take the step without the group; the group becomes stale, and its actor gives it up."""
    WAIT = "wait"
    """Wait for the group, at most `staleness.overdue_s`, since dropping would mostly affect long answers."""


class OnCollapse(StrEnum):
    """The treatment of a run that has lost what it had learned (`controller/decisions/collapse.py`)."""

    ALARM = "alarm"
    """Raise an alarm that names the likely cause; the run continues."""
    REWIND = "rewind"
    """Also return, once, to the newest checkpoint that was good, with half the learning rate."""


class Pin(StrEnum):
    """Method by which all answers of an evaluation come from one version of the weights."""

    AUTO = "auto"
    """`engine` while two or more engines serve, otherwise `gate`."""
    NONE = "none"
    """No pin: updates continue, and answers may mix versions."""
    ENGINE = "engine"
    """One engine answers alone, without updates until the evaluation ends; training continues with the others."""
    GATE = "gate"
    """Updates wait for the evaluation's end, at most `hold_s`; training continues as far as staleness allows."""


class Skill(StrEnum):
    """The measure of skill that ends a warm start."""

    EXACT = "exact"
    """The share of greedy answers that equal the reference, over all domains."""
    REWARD = "reward"
    """The verifiers' reward of sampled answers, for each domain separately."""


class Announce(StrEnum):
    """The way in which a version is announced to engines that pull their weights."""

    AUTO = "auto"
    """`stream` in a run that begins with more than 64 engines, otherwise `requests`."""
    REQUESTS = "requests"
    """A PREPARE and a COMMIT request to each engine."""
    STREAM = "stream"
    """One entry of a stream for all engines; engines that do not follow it get requests."""


class Elasticity(StrEnum):
    """The action taken when the run decides to change its number of engines."""

    DRY_RUN = "dry_run"
    """Only record the decision in an event."""
    ON = "on"


class History(StrEnum):
    """The form in which earlier turns are given to the model when a conversation continues."""

    EXACT = "exact"
    """The sampled tokens themselves: thinking stays in the context."""
    TEMPLATE = "template"
    """All messages, rendered by the chat template as in deployment; a template may drop earlier thinking."""
