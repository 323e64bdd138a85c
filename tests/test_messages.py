"""The bytes to which each control message is encoded: a map with the class name under `kind`, then the fields in order.

If a message must be changed in this table, the processes of one run must not run different versions of the code.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from inference_contract.errors import Persistence
from pipelinerl import messages
from pipelinerl.messages import (
    ActorAlive,
    CanaryChecked,
    CheckpointDelayed,
    Checkpointed,
    ConsumedReport,
    ControlMessage,
    Directive,
    EvaluationDone,
    GroupFailed,
    GroupHandedOver,
    GroupOutdated,
    GroupStages,
    NoSignalGroups,
    OrdersEnded,
    Published,
    ShownAnswer,
    ShownProblem,
    Starving,
    StepDone,
    StepSkipped,
    TrainerKnobs,
    TrainerLeaving,
    TrainerReady,
    TrainerStopped,
    VerifierFigures,
    decode_directive,
    decode_report,
    encode,
)

CONSUMED = ConsumedReport(
    trained=1, filtered=2, stale=3, failed=4, frontier=9, beyond=[11], no_signal={"toy": NoSignalGroups(right=5)}
)
ACCOUNT: dict[str, Any] = {"trained": 1, "filtered": 2, "stale": 3, "failed": 4, "frontier": 9, "beyond": [11]}
ACCOUNT["no_signal"] = {"toy": {"right": 5, "wrong": 0, "other": 0, "refused": 0}}
#: All fields of `VerifierFigures`, in their order.
FIGURES: dict[str, Any] = {
    "judged": 8, "errors": 1, "timeouts": 3, "seconds": 0.5, "errors_in_a_row": 1, "timeouts_in_a_row": 2,
    "reason": "late", "tool_episodes": 4, "calls_parsed": 6, "calls_malformed": 1, "episodes": 5, "environment_s": 2.5,
    "tool_errors": 2,
}  # fmt: skip
SHOWN = ShownProblem(
    problem_id="p",
    prompt="user: add",
    ground_truth="2",
    answers=[ShownAnswer("2", "correct", 1.0, "", "stop", 1, [(6, 1)])],
)
ANSWERS = [["2", "correct", 1.0, "", "stop", 1, [[6, 1]]]]

WIRE: list[tuple[ControlMessage, dict[str, Any]]] = [
    (
        TrainerReady(
            report_id="ready-a", incarnation="a", model_version=5, consumed=CONSUMED, claimed=2,
            solved={"toy": [(8, "p")]},
        ),
        {
            "report_id": "ready-a", "incarnation": "a", "model_version": 5, "consumed": ACCOUNT, "claimed": 2,
            "solved": {"toy": [[8, "p"]]},
        },
    ),
    (
        StepDone(
            report_id="e1-step-6", epoch=1, model_version=6, consumed=CONSUMED, stats={"loss": 0.5}, orders=[4, 8],
            by_domain={"toy": {"reward": 0.5}}, by_tag={"level=3": {"stale": 0.25}}, solved={"toy": [(8, "p")]},
            updates=[{"epoch": 1.0, "loss": 0.5}],
        ),
        {
            "report_id": "e1-step-6", "epoch": 1, "model_version": 6, "consumed": ACCOUNT, "stats": {"loss": 0.5},
            "orders": [4, 8], "by_domain": {"toy": {"reward": 0.5}}, "by_tag": {"level=3": {"stale": 0.25}},
            "solved": {"toy": [[8, "p"]]}, "updates": [{"epoch": 1.0, "loss": 0.5}],
        },
    ),
    (
        StepSkipped(
            report_id="e1-skip-6-1", epoch=1, model_version=6, consumed=CONSUMED, what="rewards", groups=[4],
            in_a_row=1,
        ),
        {
            "report_id": "e1-skip-6-1", "epoch": 1, "model_version": 6, "consumed": ACCOUNT, "what": "rewards",
            "groups": [4], "in_a_row": 1,
        },
    ),
    (
        OrdersEnded(epoch=1, model_version=6, consumed=CONSUMED, again=[7]),
        {"epoch": 1, "model_version": 6, "consumed": ACCOUNT, "again": [7]},
    ),
    (Starving(epoch=1, model_version=6, held=[3, 4]), {"epoch": 1, "model_version": 6, "held": [3, 4]}),
    (
        Published(
            epoch=1, model_version=6, membership=2, pauses_s={"http://a": 0.25}, failed={"http://b": "gone"},
            send_s=0.5, total_s=0.75, permanent=["http://b"], directive="e1-step-3",
        ),
        {
            "epoch": 1, "model_version": 6, "membership": 2, "pauses_s": {"http://a": 0.25},
            "failed": {"http://b": "gone"}, "send_s": 0.5, "total_s": 0.75, "permanent": ["http://b"], "blameless": [],
            "directive": "e1-step-3", "error": "",
        },
    ),
    (
        CanaryChecked(
            epoch=1, model_version=6, membership=2, worst={"http://a": 0.5}, mismatched={"http://b": "differs"},
            failed={"http://c": "gone"}, permanent=["http://c"],
        ),
        {
            "epoch": 1, "model_version": 6, "membership": 2, "worst": {"http://a": 0.5},
            "mismatched": {"http://b": "differs"}, "failed": {"http://c": "gone"}, "permanent": ["http://c"],
        },
    ),
    (
        Checkpointed(epoch=1, model_version=6, path="c", stall_s=0.5),
        {"epoch": 1, "model_version": 6, "path": "c", "stall_s": 0.5},
    ),
    (CheckpointDelayed(epoch=1, model_version=6, reason="no"), {"epoch": 1, "model_version": 6, "reason": "no"}),
    (TrainerStopped(epoch=1, model_version=6, left=True), {"epoch": 1, "model_version": 6, "left": True}),
    (
        TrainerLeaving(report_id="leave-a", epoch=1, model_version=6, consumed=CONSUMED),
        {"report_id": "leave-a", "epoch": 1, "model_version": 6, "consumed": ACCOUNT},
    ),
    (
        GroupFailed(
            order_id="prompt-000007", index=7, purpose="training", reason="no", persistence=Persistence.PERMANENT,
            code="context_length_exceeded", issued_at=(1, 4),
        ),
        {
            "order_id": "prompt-000007", "index": 7, "purpose": "training", "reason": "no", "persistence": "permanent",
            "code": "context_length_exceeded", "issued_at": (1, 4),
        },
    ),
    (
        GroupOutdated(order_id="prompt-000007", index=7, oldest=2, current=6, domain="toy", issued_at=(1, 4)),
        {"order_id": "prompt-000007", "index": 7, "oldest": 2, "current": 6, "domain": "toy", "issued_at": (1, 4)},
    ),
    (
        GroupHandedOver(order_id="prompt-000007", index=7, tokens_kept=90, tokens_resampled=8),
        {"order_id": "prompt-000007", "index": 7, "tokens_kept": 90, "tokens_resampled": 8},
    ),
    (
        EvaluationDone(
            order_id="eval-6-2-000001", index=1, correct=1, judged=2, oldest_version=5, newest_version=6, num_tokens=3,
            epoch=4, domain="toy", tags=["level=3"], truncated=1, lengths=[1, 2], answers=["2", ""],
            right=[True, False], unjudged=[1], shown=SHOWN,
        ),
        {
            "order_id": "eval-6-2-000001", "index": 1, "correct": 1, "judged": 2, "oldest_version": 5,
            "newest_version": 6, "num_tokens": 3, "epoch": 4, "domain": "toy", "tags": ["level=3"], "truncated": 1,
            "lengths": [1, 2], "answers": ["2", ""], "right": [True, False],
            "shown": {"problem_id": "p", "prompt": "user: add", "ground_truth": "2", "answers": ANSWERS},
            "unjudged": [1],
        },
    ),
    (
        ActorAlive(
            name="actor-0", groups_in_flight=2, groups_done=9, retries=1,
            verifiers={"math": VerifierFigures(**FIGURES)},
            filtering=VerifierFigures(judged=7), stages=[GroupStages(4, 1.0, 1.5, 1.75, "http://a", [(5, 3), (6, 2)])],
        ),
        {
            "name": "actor-0", "groups_in_flight": 2, "groups_done": 9, "retries": 1, "verifiers": {"math": FIGURES},
            "filtering": {name: type(value)() for name, value in FIGURES.items()} | {"judged": 7},
            "stages": [[4, 1.0, 1.5, 1.75, "http://a", [[5, 3], [6, 2]]]],
        },
    ),
    (
        Directive(
            answers="e1-step-6", epoch=1, knobs=TrainerKnobs(k=float("inf"), learning_rate=0.5, rollouts_per_step=8),
            publish_to=["http://a"], membership=2, failed=[7], checkpoint=True, stop=False,
            controller_state={"epoch": 1}, to_verify=["http://a"], stale=[8], fresh_until=[(0, 5), (9, 7)], issued=12,
            cores=[0, 1], rewind_to=3,
        ),
        {
            "answers": "e1-step-6", "epoch": 1,
            "knobs": {"k": float("inf"), "learning_rate": 0.5, "rollouts_per_step": 8}, "publish_to": ["http://a"],
            "membership": 2, "failed": [7], "checkpoint": True, "stop": False, "controller_state": {"epoch": 1},
            "to_verify": ["http://a"], "stale": [8], "fresh_until": [[0, 5], [9, 7]], "issued": 12, "cores": [0, 1],
            "rewind_to": 3,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "fields"), WIRE, ids=lambda value: type(value).__name__)
def test_every_control_message_is_encoded_to_the_recorded_bytes(message, fields):
    wire = msgspec.msgpack.encode({"kind": type(message).__name__, **fields})
    assert encode(message) == wire
    decode = decode_directive if isinstance(message, Directive) else decode_report
    assert decode(wire) == message


def test_every_control_message_class_has_recorded_bytes():
    known = {Directive, *typing.get_args(messages.Report)}
    assert {type(message) for message, _ in WIRE} == known == set(ControlMessage.__subclasses__())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"kind": "Directive"}),
        msgspec.msgpack.encode({"kind": "TrainerStopped", "epoch": "1", "model_version": 6}),
        msgspec.msgpack.encode({"kind": "TrainerStopped", "epoch": 1}),
        encode(WIRE[0][0])[:-1],
    ],
)
def test_bytes_that_are_no_valid_report_of_the_trainer_or_an_actor_are_rejected(payload):
    with pytest.raises(msgspec.DecodeError):
        decode_report(payload)
