"""Messages between roles on the `reports` and `directives` streams: frozen, and tagged with their class's name.

Reports go to the controller, which makes all decisions. Directives go to the trainer, which waits for the answer to
its report. Every message has a deterministic id, so a message that arrives twice has no further effect. An order is the
controller's request to sample one group of answers to a prompt (`PromptOrder`); orders are numbered by their `index`.

    trainer ── TrainerReady, StepDone, StepSkipped, TrainerLeaving, OrdersEnded, Starving, Published, CanaryChecked,
               Checkpointed, CheckpointDelayed, TrainerStopped ──▶ controller
    actor   ── GroupFailed, GroupOutdated, GroupHandedOver, EvaluationDone, ActorAlive ──▶ controller
    controller ── Directive ──▶ trainer
    trainer ── WeightsAnnounced ──▶ engines ── WeightsTaken ──▶ trainer
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from inference_contract.errors import Persistence

#: Layout version of a run's directory and streams. Increase it whenever stored names or formats change, so that a run
#: begun by an incompatible version of the project is rejected instead of misread.
#: - 1: directives are in the stream `orders`; the journal's snapshot is one flat record, without a layout version.
#: - 2: directives are in the stream `directives`; the snapshot has parts; run and snapshot store their layout version.
#: - 3: groups name their problem, verdicts their answer and parts, evaluation answers their domain.
#: - 4: the journal's knobs and ledger contain the group sizes of domains and orders, and evaluations their sets.
LAYOUT = 4

PROMPTS = "prompts"
REPORTS = "reports"
DIRECTIVES = "directives"
ROLLOUTS = "rollouts:"
#: Stream with one entry for each epoch (one start of a trainer), so that no epoch number is used twice.
EPOCHS = "epochs"
#: Streams for engines that pull weights: the trainer writes new versions to `ANNOUNCEMENTS`, and each engine writes to
#: `TAKEN` whether it has taken the version.
ANNOUNCEMENTS = "announcements"
TAKEN = "taken"
#: The number of consecutive skipped (non-finite) steps that end the run.
SKIPS_THAT_END = 3
#: The Redis consumer group in which all actors share the orders for prompts.
ACTORS_GROUP = "actors"


#: The most orders that a report may list, and the most by which an order's index may differ from those of known orders.
#: A message beyond that is forged.
MOST_AHEAD = 2**20

_T = TypeVar("_T")
#: Fields of reports. A faulty process may send anything, so decoding enforces these bounds: numbers that every JSON
#: parser reads exactly, texts that hold a traceback or the errors of several engines, and lists of at most all orders.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=2**16)]
Many = Annotated[list[_T], msgspec.Meta(max_length=MOST_AHEAD)]


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Base class of every message; msgspec tags it with the class's name."""


def kind_of(message: ControlMessage) -> str:
    """Return a message's kind in words for users, such as `step done`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", type(message).__name__).lower()


def has_ended(index: int, frontier: int, beyond: Collection[int]) -> bool:
    """Return True if the order `index` has ended: all orders below `frontier` have, and the later ones in `beyond`."""
    return index < frontier or index in beyond


class NoSignalGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a domain's groups without training signal, by reason, since its last group with signal."""

    right: Count = 0
    """Groups with only correct answers."""
    wrong: Count = 0
    """Groups with only wrong answers."""
    other: Count = 0
    """Groups with equal rewards for another reason, or without any answer to learn from."""
    refused: Count = 0
    """Groups rejected by the recipe's filter."""

    @property
    def total(self) -> int:
        return self.right + self.wrong + self.other + self.refused


class ConsumedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's counts of ended orders, by outcome.

    All orders below the index `frontier` have ended, and of the later ones those in `beyond`. `no_signal` counts, by
    domain, the groups without training signal since the domain's last group with signal.
    """

    trained: Count = 0
    filtered: Count = 0
    stale: Count = 0
    failed: Count = 0
    frontier: Count = 0
    beyond: Many[Count] = []
    no_signal: dict[Text, NoSignalGroups] = {}


class TrainerReady(ControlMessage, frozen=True):
    """A trainer has loaded version `model_version` and requests a directive.

    Each start of a trainer begins a new epoch. `claimed` is the highest epoch that any trainer of this run has used;
    the controller chooses a higher one. `solved` has the form of `StepDone.solved`. It covers the groups of all reports
    that the controller had not yet answered when the trainer's checkpoint was written.
    """

    report_id: Text
    incarnation: Text
    model_version: Count
    consumed: ConsumedReport
    claimed: Count = 0
    solved: dict[Text, Many[tuple[Count, Text]]] = {}


class StepDone(ControlMessage, frozen=True):
    """A step is complete: it trained on the groups of `orders` (indices) and made version `model_version`.

    `updates` contains metrics of each optimizer step, if a step may have several. `by_domain` and `by_tag` contain
    metrics of all groups that arrived since the previous step. `solved` lists, by domain, the groups
    among them whose answers were all correct, as pairs (order's index, problem's id).
    """

    report_id: Text
    epoch: Count
    model_version: Count
    consumed: ConsumedReport
    stats: dict[Text, float]
    orders: Many[Count] = []
    by_domain: dict[Text, dict[Text, float]] = {}
    by_tag: dict[Text, dict[Text, float]] = {}
    solved: dict[Text, Many[tuple[Count, Text]]] = {}
    updates: Many[dict[Text, float]] = []


class StepSkipped(ControlMessage, frozen=True):
    """A step was skipped because `what` is NaN or infinite; the weights are unchanged.

    `groups` lists the orders (indices) of the step's batch, which count as filtered. `in_a_row` counts the skipped
    steps since the last completed step.
    """

    report_id: Text
    epoch: Count
    model_version: Count
    consumed: ConsumedReport
    what: Text
    groups: Many[Count]
    in_a_row: Count


class TrainerLeaving(ControlMessage, frozen=True):
    """The trainer must end while the run continues; it requests a directive, then saves its state and ends."""

    report_id: Text
    epoch: Count
    model_version: Count
    consumed: ConsumedReport


class OrdersEnded(ControlMessage, frozen=True):
    """Orders ended without a step (their groups were filtered or stale), so new orders may be issued.

    `again` lists orders whose groups were sampled by weights that a trainer restart abandoned: these orders have not
    ended, and must be sampled again.
    """

    epoch: Count
    model_version: Count
    consumed: ConsumedReport
    again: Many[Count] = []


class Starving(ControlMessage, frozen=True):
    """The trainer waits for groups, and none has arrived for a while; `held` lists the orders whose groups it has."""

    epoch: Count
    model_version: Count
    held: Many[Count]


class Published(ControlMessage, frozen=True):
    """Outcome, for each engine (base URL), of a publication of weights that a directive required.

    `directive` is the id of the report that the directive answered.
    `failed` holds the reasons of engines that failed. Engines in `permanent` failed for reasons that retries cannot
    fix; engines in `blameless` failed only because other engines did. `error` says why no engine serves the version.
    """

    epoch: Count
    model_version: Count
    membership: Count
    pauses_s: dict[Text, float]
    failed: dict[Text, Text]
    send_s: float
    total_s: float
    permanent: Many[Text] = []
    blameless: Many[Text] = []
    directive: Text = ""
    error: Text = ""


class CanaryChecked(ControlMessage, frozen=True):
    """Outcome of the canary check for each engine (base URL) that had to prove that it serves newly published weights.

    `worst` holds, for engines that passed, the largest difference between their log-probs and the trainer's, in nats.
    `mismatched` describes wrong answers, and `failed` says why an engine gave no answer. Engines in `permanent` failed
    for reasons that retries cannot fix.
    """

    epoch: Count
    model_version: Count
    membership: Count
    worst: dict[Text, float]
    mismatched: dict[Text, Text] = {}
    failed: dict[Text, Text] = {}
    permanent: Many[Text] = []


class Checkpointed(ControlMessage, frozen=True):
    """A checkpoint is durable; training paused for `stall_s` seconds because of it."""

    epoch: Count
    model_version: Count
    path: Text
    stall_s: float = 0.0


class CheckpointDelayed(ControlMessage, frozen=True):
    """The checkpoint of `model_version` cannot be written yet, for a temporary reason; it is retried."""

    epoch: Count
    model_version: Count
    reason: Text


class TrainerStopped(ControlMessage, frozen=True):
    """The trainer obeyed a directive to stop, and its state is saved. If `left`, another trainer replaces it."""

    epoch: Count
    model_version: Count
    left: bool = False


class GroupFailed(ControlMessage, frozen=True):
    """An order (a request to sample one group) failed for good and is not retried.

    `persistence` says whether other orders would fail in the same way. `code` is the engine's error code, if an engine
    rejected the order (`inference_contract.errors`).
    """

    order_id: Text
    index: Count
    purpose: Text
    reason: Text
    persistence: Persistence = Persistence.TRANSIENT
    code: Text = ""
    issued_at: tuple[Count, Count] | None = None
    """The (epoch, version) of the weights when the order was issued; None if unknown."""


class GroupOutdated(ControlMessage, frozen=True):
    """An actor gave up a group: its oldest token, of version `oldest`, is too old for training at version `current`."""

    order_id: Text
    index: Count
    oldest: Count
    current: Count
    domain: Text = ""
    issued_at: tuple[Count, Count] | None = None


class GroupHandedOver(ControlMessage, frozen=True):
    """An engine failed or was removed while it sampled a group, and another engine finished the group.

    Of the first engine's tokens, `tokens_kept` are in the group and `tokens_resampled` could not be used.
    """

    order_id: Text
    index: Count
    tokens_kept: Count
    tokens_resampled: Count


class ShownAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer as shown to users; `spans` are pairs (version, number of tokens)."""

    text: Text
    outcome: Text
    reward: float
    reason: Text
    finish_reason: Text
    num_tokens: Count
    spans: Many[tuple[Count, Count]]


class ShownProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out problem with its answers, for the samples that users read; no decision depends on it."""

    problem_id: Text
    prompt: Text
    ground_truth: Text
    answers: Many[ShownAnswer]


class EvaluationDone(ControlMessage, frozen=True):
    """The samples of one held-out problem: the number of samples with a verdict, and of correct samples.

    The versions are the oldest and newest version of all tokens, and `epoch` is the oldest epoch. There is one entry
    per sample in `lengths` (sampled tokens), `answers` (as extracted by the verifier) and `right` (True if judged and
    correct). `unjudged` lists the positions of samples without a verdict; `truncated` counts samples cut off by the
    token limit. `shown` is only used for the samples that users read.
    """

    order_id: Text
    index: Count
    correct: Count
    judged: Count
    oldest_version: Count
    newest_version: Count
    num_tokens: Count
    epoch: Count = 0
    domain: Text = ""
    tags: Many[Text] = []
    truncated: Count = 0
    lengths: Many[Count] = []
    answers: Many[Text] = []
    right: Many[bool] = []
    shown: ShownProblem | None = None
    unjudged: Many[Count] = []


class VerifierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one domain's verifier in one actor, since the actor began; `seconds` is the sum over its verdicts.

    `reason` describes the newest failure. A verdict without failure clears `reason` and the `…_in_a_row` counts.
    `tool_episodes` counts the episodes that offered tools, `calls_…` the model's calls in these episodes, and
    `tool_errors` failed calls of the recipe's tools. `environment_s` is the time in seconds that episodes spent outside
    the model.
    """

    judged: Count = 0
    errors: Count = 0
    timeouts: Count = 0
    seconds: float = 0.0
    errors_in_a_row: Count = 0
    timeouts_in_a_row: Count = 0
    reason: Text = ""
    tool_episodes: Count = 0
    calls_parsed: Count = 0
    calls_malformed: Count = 0
    episodes: Count = 0
    environment_s: float = 0.0
    tool_errors: Count = 0


class GroupStages(msgspec.Struct, frozen=True, array_like=True):
    """Unix times of the stages of one group, requested by the order `index` and sampled on `engine`.

    An actor claimed the order at `claimed`. The answers were complete at `sampled`, and judged at `verified`.

    `spans` are pairs (version, number of tokens) of the group's longest answer. No decision depends on these times.
    """

    index: Count
    claimed: float
    sampled: float
    verified: float
    engine: Text
    spans: Many[tuple[Count, Count]]


class ActorAlive(ControlMessage, frozen=True):
    """An actor's heartbeat, with totals of its verifiers by domain, and of the recipe's group filter (`filtering`).

    `stages` describes a few of the groups that ended since the previous heartbeat, drawn by seed.
    """

    name: Text
    groups_in_flight: Count
    groups_done: Count
    retries: Count
    verifiers: dict[Text, VerifierFigures] = {}
    filtering: VerifierFigures = VerifierFigures()
    stages: Many[GroupStages] = []


class TrainerKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer settings that can change while the run is live; they take effect at the next step."""

    k: float
    learning_rate: float
    rollouts_per_step: int


class Directive(ControlMessage, frozen=True):
    """The controller's answer to `TrainerReady`, `StepDone`, `StepSkipped` or `TrainerLeaving`.

    `publish_to` lists the engines that must receive the trainer's weights now; empty if no publication is due.
    `membership` numbers the set of engines: if the number changes, a new process group is formed. Engines in
    `to_verify` must pass a canary check. `failed` and `stale` list orders that ended without a group. If steps
    wait for overdue groups, `issued` is the number of orders issued so far, and `fresh_until` lists pairs (first order,
    step): orders from `first order` on can be trained until that step, inclusive.
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
    cores: list[int] = []
    """The cores that the trainer shares with the engines in turn; empty if it computes on its own."""
    rewind_to: int | None = None
    """The trainer must return to its newest checkpoint of at most this version; None to continue."""


class WeightsAnnounced(msgspec.Struct, frozen=True, kw_only=True):
    """A version that all engines but `left_out` must pull; `prepare` is the JSON of the request that prepares it."""

    prepare: bytes
    left_out: list[str] = []


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the last announced version at the engine at `url`, which reads the announcements stream.

    The outcome is the contract's `answer`, or its `error` with the HTTP `status`, as JSON. Both are empty in the first
    entry of an engine, which says that the engine now reads the stream.
    """

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

#: Reports that actors send; all other reports come from the trainer.
FROM_ACTORS = (GroupFailed, GroupOutdated, GroupHandedOver, EvaluationDone, ActorAlive)

#: Reports that the trainer repeats until a directive answers them.
Question = TrainerReady | StepDone | StepSkipped | TrainerLeaving

_Message = TypeVar("_Message")

_ENCODER = msgspec.msgpack.Encoder()


def layout_refusal(what: str, found: object) -> str:
    """Return the error message for `what` (a run, say), whose layout `found` this version of pipelinerl cannot read."""
    return (
        f"{what} must be of layout {LAYOUT}, got layout {found}: it was begun by another version of pipelinerl; use "
        "that version, or begin a new run"
    )


def encode(message: ControlMessage | WeightsAnnounced | WeightsTaken) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    # msgspec does not convert these two errors to its own error.
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


#: Functions that decode the entries of one stream each; they raise `msgspec.DecodeError` for any other bytes.
decode_report = partial(_decoded, msgspec.msgpack.Decoder(Report))
decode_directive = partial(_decoded, msgspec.msgpack.Decoder(Directive))
decode_announcement = partial(_decoded, msgspec.msgpack.Decoder(WeightsAnnounced))
decode_taken = partial(_decoded, msgspec.msgpack.Decoder(WeightsTaken))
