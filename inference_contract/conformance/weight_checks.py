"""Checks of the weight group and of in-flight updates; the kit plays rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from inference_contract import routes
from inference_contract.conformance.chat_checks import check_columns
from inference_contract.conformance.session import Load, NotOffered, Session, checks_of, chunks, refused, succeeded
from inference_contract.conformance.stream_checks import gathered
from inference_contract.schemas import ChatCompletion, Choice
from inference_contract.weights import DType, WeightLayout

if TYPE_CHECKING:
    from inference_contract.conformance.trainer import KitTrainer

#: Checks of `on_update=drain` sample at most `_DRAINED_TOKENS` tokens per answer, and repeat the update until `_DRAINS`
#: updates found samples running.
_DRAINED_TOKENS: Final = 32
_DRAINS: Final = 2
_NONE_OPEN: Final = "no sample under load was in flight while new weights were committed; try a longer timeout"


def kit_trainer(session: Session) -> KitTrainer:
    """Return the trainer that the kit plays in this session. Raises `NotOffered` without torch or xxhash."""
    try:
        from inference_contract.conformance.trainer import KitTrainer
    except ImportError as error:
        raise NotOffered(f"the weight checks play the trainer and need {error.name}; install it") from error
    if not isinstance(session.peer, KitTrainer):
        session.peer = KitTrainer(session)
    return session.peer


# --- the group ---------------------------------------------------------------------------------------------------


def update_without_group_is_refused(session: Session) -> None:
    """PREPARE for a group that was never joined is rejected immediately."""
    trainer = kit_trainer(session)
    refused(trainer.update("prepare", trainer.next_version(), generation=trainer.generation + 500), 409)


def group_is_joined(session: Session) -> None:
    """/init_process_group joins a group; joining the same generation of the group again is a no-op."""
    trainer = kit_trainer(session)
    status = succeeded(trainer.form())
    assert status["generation"] == trainer.generation, "the answer must name the generation joined"
    assert (status["rank"], status["world_size"]) == (1, 2), "the answer must name rank 1 of 2"
    again = session.post(routes.INIT_PROCESS_GROUP, trainer.join_request(trainer.generation))
    assert succeeded(again) == status, "joining the same generation again must be a no-op"


def lower_generation_is_refused(session: Session) -> None:
    """Joining an older generation than the current one is rejected, and the group stays usable."""
    trainer = kit_trainer(session)
    trainer.formed()
    older = session.post(routes.INIT_PROCESS_GROUP, trainer.join_request(trainer.generation - 1))
    refused(older, 409, code="stale_generation")
    trainer.publish(1)


def higher_generation_replaces(session: Session) -> None:
    """A group of a higher generation replaces the joined group, and updates use the new group."""
    trainer = kit_trainer(session)
    trainer.formed()
    succeeded(trainer.form())
    trainer.publish(2)


def join_fails_when_rendezvous_closes(session: Session) -> None:
    """A join fails immediately if its trainer closes the rendezvous, and the previous group stays usable."""
    trainer = kit_trainer(session)
    trainer.formed()
    began = time.monotonic()
    error = refused(trainer.form_and_abandon(), 502, 504, 409)
    took_s = time.monotonic() - began
    assert error["code"] in ("peer_lost", "deadline_exceeded", "stale_generation"), f"got the code {error['code']!r}"
    assert took_s < session.timeout_s / 4, f"a join whose rendezvous is closed must fail at once, took {took_s:.1f} s"
    trainer.publish(36)


# --- an update ---------------------------------------------------------------------------------------------------


def update_is_served(session: Session) -> None:
    """After COMMIT the new version is served, and the same bytes give the same samples again."""
    trainer = kit_trainer(session)
    check_served(session, trainer.publish)
    assert session.card().digest == trainer.digest(3), "/v1/models must carry the digest that was committed"


def check_served(session: Session, update: Callable[[int], int]) -> None:
    """Fail unless, after `update(tag)`, the engine serves the kit's weights number `tag` as the version returned."""
    update(3)
    before = session.greedy()
    version = update(4)
    served = kit_trainer(session).epoch, version
    card, health = session.card(), session.health()
    assert (card.epoch, card.model_version) == served, "/v1/models must name the new version"
    assert (health.epoch, health.model_version) == served, "/health must name the new version"
    assert session.greedy()[1] != before[1], "other weights must give other log-probs: the update had no effect"
    for choice in session.chat(n=2).choices:
        check_columns(choice, versions={version})
    update(3)
    assert session.greedy() == before, "the same bytes again must give the same greedy sample and log-probs"


@contextmanager
def old_weights_stay(session: Session, update: Callable[[int], int], *, tag: int, when: str) -> Iterator[int]:
    """Yield a version; the `with` block must start an update to this version and make the update fail.

    `update(tag)` makes the engine serve the kit's weights number `tag`, and is called before the block. After the
    block, fail unless these weights are still served and the next update takes effect. `when` begins the error
    messages.
    """
    serving, before = update(tag), session.greedy()
    yield kit_trainer(session).next_version()
    assert session.card().model_version == serving, f"{when} the old version must serve"
    assert session.greedy() == before, f"{when} the old weights must serve: greedy output changed"
    update(tag + 1)
    assert session.greedy()[1] != before[1], f"{when} the next update must take effect"


def layout_id_is_enough(session: Session) -> None:
    """An engine that knows a layout accepts its id, and rejects an unknown id."""
    trainer = kit_trainer(session)
    trainer.publish(5)
    version = trainer.next_version()
    error = refused(trainer.update("prepare", version, layout_id="0" * 32), 400, 409, 422)
    assert "layout" in str(error["param"]), f"param must be layout_id, got {error['param']!r}"
    trainer.accepted(trainer.update("prepare", version, layout_id=trainer.layout.layout_id), "prepared")
    trainer.broadcast(trainer.weights(6))
    trainer.committed(version, digest=trainer.digest(6))


def same_version_is_a_no_op(session: Session) -> None:
    """PREPARE and COMMIT of the version already served change nothing and need no broadcast."""
    trainer = kit_trainer(session)
    version = trainer.publish(7)
    trainer.accepted(trainer.update("prepare", version), "already_serving")
    trainer.accepted(trainer.update("commit", version, digest=trainer.digest(7)), "already_serving")


def prepare_is_idempotent(session: Session) -> None:
    """A second PREPARE of the same update is a no-op; PREPARE of another update is rejected."""
    trainer = kit_trainer(session)
    trainer.formed()
    version = trainer.next_version()
    trainer.accepted(trainer.update("prepare", version), "prepared")
    trainer.accepted(trainer.update("prepare", version), "prepared")
    refused(trainer.update("prepare", trainer.next_version()), 409, code="update_in_progress")
    trainer.broadcast(trainer.weights(8))
    trainer.committed(version, digest=trainer.digest(8))


def older_version_is_refused(session: Session) -> None:
    """A version older than the served one is rejected, and so is an older epoch."""
    trainer = kit_trainer(session)
    version = trainer.publish(9)
    refused(trainer.update("prepare", version - 1), 409, code="stale_version")
    refused(trainer.update("prepare", version + 5, epoch=trainer.epoch - 1), 409, code="stale_version")
    assert session.card().model_version == version, "a rejected update must change nothing"


def wrong_layout_is_refused(session: Session) -> None:
    """Missing, unknown, reordered and reshaped parameters, and unsupported dtypes, are rejected by name."""
    trainer = kit_trainer(session)
    trainer.formed()
    rows: list[dict[str, Any]] = trainer.layout.model_dump(mode="json")["parameters"]
    first, rest = rows[0], rows[1:]
    other = next(dtype for dtype in DType if dtype != first["dtype"] and dtype not in session.card().converts)
    wrong = {
        "a foreign parameter": [*rows, {"name": "kit.foreign", "shape": [1], "dtype": "float32"}],
        "a wrong shape": [first | {"shape": [*first["shape"], 2]}, *rest],
        "a wrong dtype": [first | {"dtype": other}, *rest],
        "another name": [first | {"name": "kit.renamed"}, *rest],
    }
    if rest:
        wrong |= {"a missing parameter": rest, "another order": [rest[0], first, *rest[1:]]}
    for what, parameters in wrong.items():
        response = trainer.update("prepare", trainer.version + 1, layout={"parameters": parameters})
        assert response.status_code == 422, f"{what} must be refused with 422, got {response.status_code}"
        error = refused(response, 422, code="layout_mismatch")
        names = [row["name"] for row in [*rows, *parameters]]
        assert any(name in error["message"] for name in names), f"{what}: the message must name the parameter"
    trainer.publish(10)


def converted_dtype_is_served(session: Session) -> None:
    """An update in a dtype that the engine converts serves the same values as one in the engine's dtype."""
    from inference_contract.conformance.trainer import converted, digest, weights

    trainer, card = kit_trainer(session), session.card()
    others = [dtype for dtype in card.converts if any(row.dtype != dtype for row in card.layout.parameters)]
    if not others:
        raise NotOffered("the engine converts no other dtype")
    trainer.formed()
    for tag, dtype in enumerate(others, start=35):
        rows = (row.model_copy(update={"dtype": dtype}) for row in card.layout.parameters)
        wire = WeightLayout(parameters=tuple(rows))
        data = weights(wire, tag)
        version = trainer.next_version()
        trainer.accepted(trainer.update("prepare", version, layout=wire.model_dump(mode="json")), "prepared")
        trainer.broadcast(data, layout=wire)
        trainer.committed(version, digest=digest(data))
        served, sampled = session.card(), session.greedy()
        assert served.digest == digest(data), f"after an update in {dtype} the digest must be that of the bytes sent"
        assert served.layout == card.layout, "the layout must describe the engine's weights, not the update"
        trainer.publish(converted(data, wire, card.layout))
        assert session.greedy() == sampled, f"an update in {dtype} must serve its values, rounded to nearest"


def commit_needs_prepare(session: Session) -> None:
    """COMMIT and ABORT without PREPARE are rejected."""
    trainer = kit_trainer(session)
    version = trainer.next_version()
    refused(trainer.update("commit", version, digest="0" * 32), 409, code="not_prepared")
    refused(trainer.update("abort", version), 409, code="not_prepared")


def wrong_digest_is_refused(session: Session) -> None:
    """Bytes that do not match the digest leave the old weights in service, and the next update works."""
    trainer = kit_trainer(session)
    with old_weights_stay(session, trainer.publish, tag=11, when="after a wrong digest") as version:
        trainer.accepted(trainer.update("prepare", version), "prepared")
        trainer.broadcast(trainer.weights(12))
        refused(trainer.update("commit", version, digest="f" * 32), 502, code="digest_mismatch")


def abort_leaves_old_weights(session: Session) -> None:
    """An aborted update keeps the old weights; after a new join the next update works."""
    trainer = kit_trainer(session)
    with old_weights_stay(session, trainer.publish, tag=13, when="after an abort") as version:
        trainer.accepted(trainer.update("prepare", version), "prepared")
        trainer.accepted(trainer.update("abort", version), "aborted")
        trainer.leave()


def lost_trainer_leaves_old_weights(session: Session) -> None:
    """The engine keeps serving when the trainer dies during a broadcast, and can be updated again."""
    trainer = kit_trainer(session)
    with old_weights_stay(session, trainer.publish, tag=15, when="after a lost trainer") as version:
        trainer.accepted(trainer.update("prepare", version), "prepared")
        trainer.leave()
        check_lost(trainer.update("commit", version, digest="0" * 32))


def check_lost(response: httpx.Response) -> None:
    """Fail unless the response is an error that a lost peer can cause."""
    error = refused(response, 502, 504, 409)
    assert error["code"] in ("peer_lost", "deadline_exceeded", "not_prepared"), f"got the code {error['code']!r}"


# --- in flight ---------------------------------------------------------------------------------------------------


def update_in_flight(session: Session) -> None:
    """Sampling continues during an update, and a stream's version spans name the version that sampled each token."""
    for update in _broadcasts_under_load(session, session.streamed):
        streams = [gathered(chunks(answer, answer.text.splitlines())) for answer in update.answers]
        if update.spans_are_right([choice for stream in streams for choice in stream]):
            return
    raise NotOffered(_NONE_OPEN)


def update_during_whole_answer(session: Session) -> None:
    """The version spans of an unstreamed answer that was being sampled during an update name both versions."""
    for update in _broadcasts_under_load(session, session.completed):
        if update.spans_are_right(update.whole_choices()):
            return
    raise NotOffered(_NONE_OPEN)


def abort_on_update_ends_samples(session: Session) -> None:
    """With on_update=abort running samples end with finish_reason `abort`, and each has tokens of one version only."""
    for update in _broadcasts_under_load(session, session.completed, on_update="abort"):
        aborted = 0
        for choice in update.whole_choices():
            aborted += choice.finish_reason == "abort"
            check_columns(choice, versions={update.old} if choice.finish_reason == "abort" else None)
            spans = choice.version_spans or ()
            assert len(spans) < 2, f"with on_update=abort a sample must be of one version, its spans are {spans}"
        if aborted:
            return
    raise NotOffered(_NONE_OPEN)


def drain_finishes_running_samples(session: Session) -> None:
    """With on_update=drain running samples finish with the old weights and are not cut short."""
    drained = 0
    for update in _broadcasts_under_load(session, session.completed, length=_DRAINED_TOKENS, on_update="drain"):
        choices = update.whole_choices()
        crossed = update.spans_are_right(choices)
        assert not crossed, "with on_update=drain a sample must be of one version, spans name both"
        aborted = sum(choice.finish_reason == "abort" for choice in choices)
        assert not aborted, f"with on_update=drain samples must end by themselves, {aborted} were aborted"
        drained += update.named(choices, update.old) > update.before_commit
        if drained == _DRAINS:
            return
    raise NotOffered(_NONE_OPEN)


@dataclass(frozen=True, slots=True)
class LoadedUpdate:
    """An update and the answers to requests sent during it.

    The engine's metrics count the tokens of these answers. `before_commit` tokens were sampled before COMMIT, by
    version `old`; this is a lower bound, since counters lag. `after_commit` tokens were sampled after the answer to
    COMMIT, by version `new`.
    """

    old: int
    new: int
    answers: list[httpx.Response]
    before_commit: float
    after_commit: float

    def spans_are_right(self, choices: list[Choice]) -> bool:
        """Fail if the version spans are wrong; return True if a sample has tokens of both versions."""
        for choice in choices:
            check_columns(choice, versions={self.old, self.new})
        for when, sampled, version in (
            ("before", self.before_commit, self.old),
            ("after", self.after_commit, self.new),
        ):
            named = self.named(choices, version)
            assert named >= sampled, (
                f"{sampled:g} tokens were sampled {when} COMMIT, but the spans attribute {named} to version {version}"
            )
        return any(len(choice.version_spans or ()) == 2 for choice in choices)

    @staticmethod
    def named(choices: list[Choice], version: int) -> int:
        """Return the number of tokens that the choices' version spans attribute to `version`."""
        return sum(count for choice in choices for each, count in choice.version_spans or () if each == version)

    def whole_choices(self) -> list[Choice]:
        """Return the choices of all answers; only for answers that were not streamed."""
        return [c for answer in self.answers for c in ChatCompletion.model_validate(succeeded(answer)).choices]


def updates_under_load(
    session: Session,
    ask: Callable[..., httpx.Response],
    prepare: Callable[[], tuple[int, int]],
    send: Callable[[int], None],
    *,
    length: int = 256,
    **commit: Any,
) -> Iterator[LoadedUpdate]:
    """Update the engine again and again under load, until the session's timeout; yield each update with its answers.

    The load is chat requests for up to `length` tokens, sent by `ask`. Before the load starts, `prepare` returns the
    version served and the next one; then `send(next)` transfers the bytes, and COMMIT is sent with the fields `commit`.
    """
    trainer, deadline = kit_trainer(session), time.monotonic() + session.timeout_s
    length = min(length, session.card().context_length // 2)
    while time.monotonic() < deadline:
        old, new = prepare()
        with Load(session, lambda seed: ask(n=16, max_tokens=length, seed=seed)) as load:
            send(new)
            before_commit = load.sampled()
            trainer.committed(new, **commit)
            committed = load.sampled()
        yield LoadedUpdate(old, new, load.answers, before_commit, load.sampled() - committed)


def _broadcasts_under_load(
    session: Session, ask: Callable[..., httpx.Response], *, length: int = 256, on_update: str = "continue"
) -> Iterator[LoadedUpdate]:
    trainer = kit_trainer(session)

    def prepare() -> tuple[int, int]:
        old, new = trainer.publish(17), trainer.next_version()
        trainer.accepted(trainer.update("prepare", new, on_update=on_update), "prepared")
        return old, new

    def send(_: int) -> None:
        trainer.broadcast(trainer.weights(18))

    commit = {"digest": trainer.digest(18), "on_update": on_update}
    return updates_under_load(session, ask, prepare, send, length=length, **commit)


CHECKS = checks_of(globals())
