"""Choices that a recipe makes and a part of the run obeys: declared here once, where both can see them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: The coldest and the hottest temperature that every engine samples at; a colder one divides by next to nothing.
COLDEST: Final = 1e-5
HOTTEST: Final = 100.0


class WeightFormat(StrEnum):
    """How an engine keeps the weights of linear layers, whatever dtype they come in; all else keeps the model's."""

    NATIVE = "native"
    """Weights stay as they come."""
    INT8 = "int8"
    """Eight bits with a scale for each output channel, and activations in eight bits with one for each token."""
    INT4 = "int4"
    """The error of four-bit weights, for experiments: kept and multiplied like `int8`, so no smaller and no faster."""


class VerifierLocation(StrEnum):
    """Whose processes judge the answers of a run."""

    ACTORS = "actors"
    """Each actor's own."""
    SERVICES = "services"
    """Those of verifier services, which the launcher or somebody else starts, on any machine."""


class Receiver(StrEnum):
    """Where an engine that stages weights in its own process has its endpoint in the weight group."""

    IN_PROCESS = "in_process"
    """In the same process: nothing is copied, and a peer that sends more than it has announced ends the engine."""
    OWN_PROCESS = "own_process"
    """In another, whose death the engine survives: for networks with peers that are not trusted."""


class OldLogprobs(StrEnum):
    """Where `old_logprobs` come from, the denominator of PPO's ratio.

    In flight the tokens of a batch, and of one rollout, come from up to k + 1 versions, so that "the old policy" is one
    of two things. In lockstep (j = k = 1) they are the same.
    """

    SAMPLING_WEIGHTS = "sampling_weights"
    """A forward pass at the weights that sampled each token (RLAX §5.1), which a `WeightHistory` keeps. old/behavior
    is numerics alone (and the age of caches, where updates leave them), current/old all of the staleness."""
    RECOMPUTE = "recompute"
    """A forward pass at the weights that the step starts from: the proximal policy of decoupled PPO (Hilton et al.
    2022; AReaL). old/behavior carries staleness and numerics both, and current/old begins at 1."""
    BEHAVIOR = "behavior"
    """What the sampler said; no pass."""


class RoutingReplay(StrEnum):
    """Whose experts compute a token of a mixture-of-experts model in the trainer."""

    OFF = "off"
    """Those that the trainer's own routers choose."""
    ROLLOUT = "rollout"
    """Those that computed it in the sampler: rollout routing replay, R3 (Ma et al. 2025)."""


class NoSignal(StrEnum):
    """What becomes of a group whose rewards are all equal."""

    TRAIN = "train"
    """It counts as part of its step, which therefore stands for the problems as they came."""
    FILTER = "filter"
    """It is dropped and the step waits for another: dynamic sampling (DAPO §3.2)."""


class Truncated(StrEnum):
    """What becomes of a rollout that ended for want of tokens, whose verdict says little of what it was coming to."""

    TRAIN = "train"
    """It trains as any other; a soft punishment of length may go with it (`domains.reward.overlong_tokens`)."""
    MASK = "mask"
    """None of its tokens has a gradient: overlong filtering (DAPO §3.4)."""


class StalenessScope(StrEnum):
    """What is refused when a token of it is too old."""

    GROUP = "group"
    """The whole group: an advantage is taken over all that were sampled of a problem."""
    ROLLOUT = "rollout"
    """That rollout alone. Two or more that are left train, against the mean of those that are left."""


class Overdue(StrEnum):
    """What becomes of a group that is still being sampled when its last step comes."""

    DROP = "drop"
    """The step is taken; the group will be stale, and its actor gives it up."""
    WAIT = "wait"
    """The step waits for it, at most `staleness.overdue_s`, since it is the long answers that come late."""


class Pin(StrEnum):
    """How one version of the weights is made to answer a whole evaluation."""

    AUTO = "auto"
    """`engine` while two or more engines serve, else `gate`."""
    NONE = "none"
    """Not at all: updates go on, and answers may mix versions."""
    ENGINE = "engine"
    """One engine answers alone and is left out of updates until the end; training goes on with the others."""
    GATE = "gate"
    """Updates are postponed until the end, at most `hold_s`; training goes on as far as staleness allows."""


class Skill(StrEnum):
    """What says that a warm start has taught a model enough."""

    EXACT = "exact"
    """Greedy answers that equal the reference, of all domains together."""
    REWARD = "reward"
    """The verifiers' reward of sampled answers, of each domain by itself."""


class Announce(StrEnum):
    """How engines that pull their weights are told that there is a version."""

    AUTO = "auto"
    """By requests, and by the stream in a run that begins with more than 64 engines."""
    REQUESTS = "requests"
    """Each by two requests."""
    STREAM = "stream"
    """All by one entry of a stream, those that do not follow it by requests."""


class Elasticity(StrEnum):
    """What becomes of a decision to have more engines, or fewer."""

    DRY_RUN = "dry_run"
    """It is told in an event, and nothing is done."""
    ON = "on"
