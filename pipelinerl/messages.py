"""What roles tell one another through the `reports` and `directives` streams: frozen, tagged, versioned by their names.

Reports go to the controller, which alone decides; directives go to the trainer, which waits for the one that answers
its report. Every message has a deterministic id, so that repeating it is a no-op.

    trainer ── TrainerReady, StepDone, StepSkipped, OrdersEnded, Starving, Published, CanaryChecked, Checkpointed,
               CheckpointDelayed, TrainerStopped ──▶ controller
    actor   ── GroupFailed, GroupOutdated, GroupHandedOver, EvaluationDone, ActorAlive ──▶ controller
    controller ── Directive ──▶ trainer
    trainer ── WeightsAnnounced ──▶ engines ── WeightsTaken ──▶ trainer
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from inference_contract.errors import Persistence

#: The layout of a run's directory and streams. It grows whenever what lies there takes another name or shape, so that a
#: run that another version of the project began is refused, and never misread.
#: 1: directives lie in the stream `orders`, the journal's snapshot holds the state in one flat record, and no number.
#: 2: directives lie in the stream `directives`, the snapshot holds the state in parts, and both say their layout.
#: 3: a group says which problem it answers, a verdict its answer and parts, an evaluation's answer its domain.
#: 4: the journal's knobs and ledger hold the group sizes of domains and orders, an evaluation the sets that it asks.
LAYOUT = 4

PROMPTS = "prompts"
REPORTS = "reports"
DIRECTIVES = "directives"
ROLLOUTS = "rollouts:"
#: Holds an entry for each epoch that ever began, so that none begins twice.
EPOCHS = "epochs"
#: Versions of the weights that engines are to pull, where they are not told one by one; and what became of each.
ANNOUNCEMENTS = "announcements"
TAKEN = "taken"
#: So many steps in a row that are not finite end the run.
SKIPS_THAT_END = 3
#: The consumer group in which actors share the prompt orders.
ACTORS_GROUP = "actors"


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Base of every message; the tag is the class's name."""


def has_ended(index: int, frontier: int, beyond: Collection[int]) -> bool:
    """Has this order ended? All below `frontier` have, and of the others those in `beyond`."""
    return index < frontier or index in beyond


class NoSignalGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one domain, without one in between that has something to teach."""

    right: int = 0
    """All answers were right."""
    wrong: int = 0
    """All answers were wrong."""
    other: int = 0
    """The rewards were equal for another reason, or no answer may be learnt from."""
    refused: int = 0
    """The recipe's filter refused them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.right + self.wrong + self.other + self.refused


class ConsumedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's account so far: orders that ended, by fate, and where that account stands.

    `no_signal` counts, by domain, the groups that came since the domain's last group with something to teach.
    """

    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    frontier: int = 0
    beyond: list[int] = []
    no_signal: dict[str, NoSignalGroups] = {}


class TrainerReady(ControlMessage, frozen=True):
    """A trainer has loaded weights `model_version` and asks what to do. Begins a new epoch, above all that were ever
    `claimed` in its directory. `solved`, as of `StepDone`, holds what no report that was answered before its checkpoint
    has said."""

    report_id: str
    incarnation: str
    model_version: int
    consumed: ConsumedReport
    claimed: int = 0
    solved: dict[str, list[tuple[int, str]]] = {}


class StepDone(ControlMessage, frozen=True):
    """A step is applied on the groups of `orders`; the weights are `model_version` now.

    `updates` holds figures of each of its optimizer steps, where it was to have several. `by_domain` and `by_tag` hold
    figures of all groups that came since the last step, by the name of the domain or tag; `solved`, by domain, the
    order and the problem's id of those of them whose answers were all right.
    """

    report_id: str
    epoch: int
    model_version: int
    consumed: ConsumedReport
    stats: dict[str, float]
    orders: list[int] = []
    by_domain: dict[str, dict[str, float]] = {}
    by_tag: dict[str, dict[str, float]] = {}
    solved: dict[str, list[tuple[int, str]]] = {}
    updates: list[dict[str, float]] = []


class StepSkipped(ControlMessage, frozen=True):
    """A step was not applied, since `what` of the orders `groups` is NaN or infinite; the weights are as before.

    The orders of its batch are accounted for as filtered. `in_a_row` counts such steps since the last that was applied.
    """

    report_id: str
    epoch: int
    model_version: int
    consumed: ConsumedReport
    what: str
    groups: list[int]
    in_a_row: int


class TrainerLeaving(ControlMessage, frozen=True):
    """The trainer's process is about to end, though the run goes on: it asks to save its state first."""

    report_id: str
    epoch: int
    model_version: int
    consumed: ConsumedReport


class OrdersEnded(ControlMessage, frozen=True):
    """Orders ended without a step (filtered or stale), so that new prompts may be issued.

    `again` lists orders whose groups were sampled by weights of an abandoned epoch: they have not ended.
    """

    epoch: int
    model_version: int
    consumed: ConsumedReport
    again: list[int] = []


class Starving(ControlMessage, frozen=True):
    """The trainer waits for a step and nothing has come for a while; the groups of the orders `held` wait with it."""

    epoch: int
    model_version: int
    held: list[int]


class Published(ControlMessage, frozen=True):
    """Outcome of the publication that `directive` asked for, by the name it answers; engine by engine (base URL).

    For those in `permanent`, no retry mends the reason in `failed`; those in `blameless` failed because of others.
    """

    epoch: int
    model_version: int
    membership: int
    pauses_s: dict[str, float]
    failed: dict[str, str]
    send_s: float
    total_s: float
    permanent: list[str] = []
    blameless: list[str] = []
    directive: str = ""


class CanaryChecked(ControlMessage, frozen=True):
    """What became of the engines that had to prove the weights just published to them (base URL).

    `worst` holds, of those that did, the largest difference between their log-probs and the trainer's, in nats;
    `mismatched` says how the others' answers were wrong, `failed` why there was none; for those in `permanent` no retry
    mends that.
    """

    epoch: int
    model_version: int
    membership: int
    worst: dict[str, float]
    mismatched: dict[str, str] = {}
    failed: dict[str, str] = {}
    permanent: list[str] = []


class Checkpointed(ControlMessage, frozen=True):
    """A checkpoint is durable; training stood still for it for `stall_s`."""

    epoch: int
    model_version: int
    path: str
    stall_s: float = 0.0


class CheckpointDelayed(ControlMessage, frozen=True):
    """The checkpoint of `model_version` cannot be written yet, for a reason that may pass; it is tried again."""

    epoch: int
    model_version: int
    reason: str


class TrainerStopped(ControlMessage, frozen=True):
    """The trainer obeyed a directive to stop; its state is saved. With `left`, another is to take its place."""

    epoch: int
    model_version: int
    left: bool = False


class GroupFailed(ControlMessage, frozen=True):
    """An order cannot be completed; it will not be tried again. `persistence` says whether another would be.

    `code` is the engine's, where one has refused (`inference_contract.errors`).
    """

    order_id: str
    index: int
    purpose: str
    reason: str
    persistence: Persistence = Persistence.TRANSIENT
    code: str = ""


class GroupOutdated(ControlMessage, frozen=True):
    """An actor has given an order up: sampling began at `oldest`, and at version `current` it could train no step."""

    order_id: str
    index: int
    oldest: int
    current: int
    domain: str = ""


class GroupHandedOver(ControlMessage, frozen=True):
    """An engine failed, or was taken out, while it sampled a group; another has ended it.

    Of the group's tokens, `tokens_kept` are the first engine's; `tokens_resampled` came from it and could not be used.
    """

    order_id: str
    index: int
    tokens_kept: int
    tokens_resampled: int


class ShownAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer as people read it; `spans` are of (version, tokens)."""

    text: str
    outcome: str
    reward: float
    reason: str
    finish_reason: str
    num_tokens: int
    spans: list[tuple[int, int]]


class ShownProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out problem and its answers, for the samples that people read: nothing is decided by it."""

    problem_id: str
    prompt: str
    ground_truth: str
    answers: list[ShownAnswer]


class EvaluationDone(ControlMessage, frozen=True):
    """The samples of one held-out problem: how many have a verdict, and how many are right.

    The versions are those of the oldest and the newest of all their tokens, `epoch` the oldest that began one. Sample
    by sample: `lengths`, tokens that were sampled; `answers`, what the verifier took for the answer; `right`, was it
    judged and right. `unjudged` lists the places of samples without a verdict; `truncated` counts those that ended for
    want of tokens. `shown` goes no further than the samples.
    """

    order_id: str
    index: int
    correct: int
    judged: int
    oldest_version: int
    newest_version: int
    num_tokens: int
    epoch: int = 0
    domain: str = ""
    tags: list[str] = []
    truncated: int = 0
    lengths: list[int] = []
    answers: list[str] = []
    right: list[bool] = []
    shown: ShownProblem | None = None
    unjudged: list[int] = []


class VerifierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor's verifier of one domain has done since the actor began; `seconds` is the sum over its verdicts.

    Those in a row are since the last verdict that says something of an answer; `reason` is the newest of theirs.
    """

    judged: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    errors_in_a_row: int = 0
    timeouts_in_a_row: int = 0
    reason: str = ""


class GroupStages(msgspec.Struct, frozen=True, array_like=True):
    """When an actor had claimed the order `index`, had it sampled by `engine`, and had it verified, in Unix seconds.

    `spans` are of (version, tokens), of its longest answer. Nothing is decided by it.
    """

    index: int
    claimed: float
    sampled: float
    verified: float
    engine: str
    spans: list[tuple[int, int]]


class ActorAlive(ControlMessage, frozen=True):
    """An actor's heartbeat; `verifiers` is by domain, `filtering` counts the groups that a recipe's filter judged.

    `stages` are of a few of the groups that it has ended since the heartbeat before, drawn by seed.
    """

    name: str
    groups_in_flight: int
    groups_done: int
    retries: int
    verifiers: dict[str, VerifierFigures] = {}
    filtering: VerifierFigures = VerifierFigures()
    stages: list[GroupStages] = []


class TrainerKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs that the trainer obeys, as of a step boundary."""

    k: float
    learning_rate: float
    rollouts_per_step: int


class Directive(ControlMessage, frozen=True):
    """The controller's answer to `TrainerReady`, `StepDone`, `StepSkipped` or `TrainerLeaving`.

    `publish_to` lists the engines to be given the trainer's weights now (empty: none are due); `membership` numbers
    the set, so that a changed set forms a new group; those in `to_verify` have to pass a canary check. `failed` and
    `stale` list orders that ended without a group. Where steps wait for what is overdue, `fresh_until` says of the
    orders from each first one on which step is the last that they can surely train, and `issued` how many there are.
    """

    answers: str
    epoch: int
    knobs: TrainerKnobs
    publish_to: list[str]
    membership: int
    failed: list[int]
    checkpoint: bool
    stop: bool
    controller_state: dict[str, Any] | None = None
    to_verify: list[str] = []
    stale: list[int] = []
    fresh_until: list[tuple[int, int]] = []
    issued: int = 0


class WeightsAnnounced(msgspec.Struct, frozen=True, kw_only=True):
    """A version that engines are to pull and serve, all that read it but those `left_out` (base URLs).

    `prepare` is the JSON of the contract's request that prepares it.
    """

    prepare: bytes
    left_out: list[str] = []


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at `url` follows announcements, and what became of the last: the contract's `answer` or `error`, as
    JSON, with the HTTP `status` of the latter. As it begins to follow, it has neither."""

    url: str
    epoch: int = -1
    version: int = -1
    answer: bytes = b""
    error: bytes = b""
    status: int = 200


Report = (
    TrainerReady
    | StepDone
    | StepSkipped
    | TrainerLeaving
    | OrdersEnded
    | Starving
    | Published
    | CanaryChecked
    | Checkpointed
    | CheckpointDelayed
    | TrainerStopped
    | GroupFailed
    | GroupOutdated
    | GroupHandedOver
    | EvaluationDone
    | ActorAlive
)

#: Reports that an actor makes; the others are the trainer's.
FROM_ACTORS = (GroupFailed, GroupOutdated, GroupHandedOver, EvaluationDone, ActorAlive)

#: Reports that the trainer repeats until a directive answers them.
Question = TrainerReady | StepDone | StepSkipped | TrainerLeaving

_Message = TypeVar("_Message")

#: So far beyond what it knows of may an order be that a message speaks of; a forged one is further.
MOST_AHEAD = 2**20

_REPORTS = msgspec.msgpack.Decoder(Report)
_DIRECTIVES = msgspec.msgpack.Decoder(Directive)
_ANNOUNCEMENTS = msgspec.msgpack.Decoder(WeightsAnnounced)
_TAKEN = msgspec.msgpack.Decoder(WeightsTaken)
_ENCODER = msgspec.msgpack.Encoder()


def layout_refusal(what: str, found: object) -> str:
    """Why `what`, which is of the layout `found`, is not read, and what to do."""
    return (
        f"{what} must be of layout {LAYOUT}, got layout {found}: another version of pipelinerl began it; use that "
        "version for it, or begin a new run"
    )


def encode(message: ControlMessage) -> bytes:
    """Wire bytes of a message."""
    return _ENCODER.encode(message)


def encode_struct(message: WeightsAnnounced | WeightsTaken) -> bytes:
    """Wire bytes of what lies in a stream of its own kind."""
    return _ENCODER.encode(message)


def decode_announcement(payload: bytes) -> WeightsAnnounced:
    """Inverse of `encode_struct`; raises `msgspec.DecodeError` on anything else."""
    return _decoded(_ANNOUNCEMENTS, payload)


def decode_taken(payload: bytes) -> WeightsTaken:
    """Inverse of `encode_struct`; raises `msgspec.DecodeError` on anything else."""
    return _decoded(_TAKEN, payload)


def decode_report(payload: bytes) -> Report:
    """Inverse of `encode` for reports; raises `msgspec.DecodeError` on anything else."""
    return _decoded(_REPORTS, payload)


def decode_directive(payload: bytes) -> Directive:
    """Inverse of `encode` for directives; raises `msgspec.DecodeError` on anything else."""
    return _decoded(_DIRECTIVES, payload)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through as they are
        raise msgspec.DecodeError(str(error)) from None
