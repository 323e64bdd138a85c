"""The binary format of records: one msgpack header, raw little-endian columns, and a digest that is checked on read.

    offset  size
    0       4     magic `PLRL`
    4       1     format version
    5       1     kind: 1 rollout group, 2 order for a prompt, 3 message
    6       2     zero
    8       4     H, bytes of the header
    12      4     B, bytes of the columns
    16      H     header (msgpack), then zeros up to a multiple of 8
            B     columns, each beginning at a multiple of 8
            8     xxh3_64 of everything before it

Decoding returns exactly what was encoded; a damaged, truncated or unknown record raises `RecordError`. Nothing in a
record is executed. Decoded arrays are read-only views into the record. A group stores each distinct context once, so G
rollouts that share a prompt store it just once. A sampled token costs 8 bytes. Routed experts, if known, add layers ·
top_k bytes per token, or twice that with more than 256 experts. They are stored once per context, too: of G rollouts
that share a prompt, only the first rollout's routing of the prompt is kept.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pipelinerl.errors import RecordError
from pipelinerl.types import (
    NO_NOTE,
    ROOT,
    IssuedAt,
    Outcome,
    ProblemSummary,
    PromptOrder,
    RewardPart,
    Rollout,
    RolloutGroup,
    Turn,
    TurnNote,
    Verdict,
    VersionSpan,
)
from trainer_contract.types import Experts

FORMAT: Final = 5
#: Format versions that can be read. Format 4 lacks `engines`, format 3 also `issued_at`, and format 2 also segments:
#: each of its rollouts is a single segment.
_READ: Final = frozenset({2, 3, 4, FORMAT})
#: Upper bound on order indices, versions and epochs, far above those of any run.
_MOST: Final = 2**53
_MAGIC: Final = b"PLRL"
_PREFIX: Final = struct.Struct("<4sBBHII")
_DIGEST: Final = struct.Struct("<Q")

_Header = TypeVar("_Header")
_Value = TypeVar("_Value", bound=Hashable)

_IDS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")
#: `attrgetter` reads the fields of a group's many rollouts faster than Python code does. An outcome's value is read
#: instead of the outcome, because hashing an enum member runs slow Python code.
_FINDING: Final = attrgetter("outcome._value_", "reward", "reason", "answer", "parts")
_ENDING: Final = attrgetter("finish_reason", "temperature", "epoch")
_NOTE: Final = attrgetter("note")
_PARENTS: Final = attrgetter("parents")
#: Columns of routed experts: [N, layers, top_k] of the N sampled tokens, [C, layers, top_k] of the contexts' C tokens.
SAMPLED_EXPERTS: Final = "routed_experts"
CONTEXT_EXPERTS: Final = "context_routed_experts"
_EXPERTS: Final = (np.dtype(np.uint8), np.dtype("<u2"))


class Kind(IntEnum):
    """Kinds of records, by content."""

    GROUP = 1
    ORDER = 2
    MESSAGE = 3


class KindedMessage(NamedTuple):
    """A message of plain data: its `kind`, such as `dead-letter`, and its fields (`body`)."""

    kind: str
    body: dict[str, Any]


class _Column(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Finding(NamedTuple):
    outcome: Outcome
    reward: float
    reason: str
    answer: str
    parts: tuple[RewardPart, ...]


class _Ending(NamedTuple):
    finish_reason: str
    temperature: float
    epoch: int


class _GroupHeader(msgspec.Struct, array_like=True, frozen=True):
    """A group without its arrays (columns).

    Fields `turn_*` have one entry for each turn, of all rollouts in sequence; `rollout_*` have one for each rollout.
    Distinct contexts, version spans, findings (verdicts), endings and notes are listed once each; turns and rollouts
    refer to them by index. `columns` describes the arrays, in order: context ids, sampled ids, log-probs, additional
    ones. `turn_notes` is empty if no turn has a note, `rollout_parents` if every rollout is one segment.
    """

    group_id: str
    index: int
    domain: str
    actor: str
    problem: ProblemSummary
    context_lengths: list[int]
    spans: list[tuple[VersionSpan, ...]]
    findings: list[_Finding]
    endings: list[_Ending]
    turn_contexts: list[int]
    turn_spans: list[int]
    rollout_turns: list[int]
    rollout_findings: list[int]
    rollout_endings: list[int]
    columns: list[_Column]
    refusal: str = ""
    notes: list[TurnNote] = []
    turn_notes: list[int] = []
    rollout_parents: list[tuple[int, ...]] = []
    issued_at: IssuedAt = IssuedAt()
    engines: tuple[str, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_group_decoder: Final = msgspec.msgpack.Decoder(_GroupHeader)
_order_decoder: Final = msgspec.msgpack.Decoder(PromptOrder)
_message_decoder: Final = msgspec.msgpack.Decoder(KindedMessage)


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group as a record. Raises `RecordError` for wrong dtypes or shapes, and for version spans that do not
    cover all tokens.
    """
    rollouts = group.rollouts
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    contexts, turn_contexts = _distinct_contexts(turns)
    lengths = [len(turn.token_ids) for turn in turns]
    scored = [len(turn.behavior_logprobs) for turn in turns]
    spanned = [_spanned(turn.spans) for turn in turns]
    if not lengths == scored == spanned:
        raise RecordError(
            f"group {group.group_id}: each turn must have one log-probability for each token, and spans that sum to "
            f"its tokens; got tokens {lengths}, log-probabilities {scored}, spans {spanned}"
        )
    experts = _expert_columns(turns, turn_contexts)
    arrays = [
        _joined("context_token_ids", contexts, _IDS),
        _joined("token_ids", [turn.token_ids for turn in turns], _IDS),
        _joined("behavior_logprobs", [turn.behavior_logprobs for turn in turns], _LOGPROBS),
        *experts.values(),
    ]
    spans, turn_spans = _distinct([turn.spans for turn in turns])
    findings, rollout_findings = _distinct([_FINDING(rollout.verdict) for rollout in rollouts])
    endings, rollout_endings = _distinct(list(map(_ENDING, rollouts)))
    notes, turn_notes = _distinct(list(map(_NOTE, turns)))
    parents = list(map(_PARENTS, rollouts))
    header = _GroupHeader(
        group_id=group.group_id,
        index=group.index,
        domain=group.domain,
        actor=group.actor,
        problem=group.problem,
        context_lengths=[len(context) for context in contexts],
        spans=spans,
        findings=[_Finding(*each) for each in findings],
        endings=[_Ending(*each) for each in endings],
        turn_contexts=turn_contexts,
        turn_spans=turn_spans,
        rollout_turns=[len(rollout.turns) for rollout in rollouts],
        rollout_findings=rollout_findings,
        rollout_endings=rollout_endings,
        columns=[_Column(name, column.dtype.str, column.shape) for name, column in experts.items()],
        refusal=group.refusal,
        notes=[] if notes == [NO_NOTE] else notes,
        turn_notes=[] if notes == [NO_NOTE] else turn_notes,
        rollout_parents=parents if any(parents) else [],
        issued_at=group.issued_at,
        engines=group.engines,
    )
    return _seal(Kind.GROUP, header, arrays)


def decode_group(record: bytes) -> RolloutGroup:
    """Decode a group; its arrays are read-only views. Raises `RecordError` for damaged or inconsistent records."""
    packed, columns = _open(record, Kind.GROUP)
    header = _parse(_group_decoder, packed)
    try:
        lengths = _turn_lengths(header)
        contexts, start = _split(columns, _IDS, header.context_lengths, 0)
        tokens, start = _split(columns, _IDS, lengths, start)
        logprobs, _ = _split(columns, _LOGPROBS, lengths, start)
        turns = [
            Turn(
                context_token_ids=contexts[context], token_ids=ids, behavior_logprobs=values, spans=header.spans[spans]
            )
            for context, ids, values, spans in zip(
                header.turn_contexts, tokens, logprobs, header.turn_spans, strict=True
            )
        ]
        if header.columns:
            turns = _with_experts(header, columns, turns)
        if header.turn_notes:
            notes = [header.notes[number] for number in header.turn_notes]
            turns = [replace(turn, note=note) for turn, note in zip(turns, notes, strict=True)]
        rollouts = _rollouts(header, turns)
        if not 0 <= header.index < _MOST:
            raise ValueError(f"index {header.index}")
        for span in (span for spans in header.spans for span in spans):
            if not (0 <= span.model_version < _MOST and 0 <= span.num_tokens < _MOST):
                raise ValueError(f"it has a span of {span.num_tokens} tokens from version {span.model_version}")
        for ending in header.endings:
            if not 0 <= ending.epoch < _MOST:
                raise ValueError(f"epoch {ending.epoch}")
    except (ValueError, IndexError) as error:
        raise RecordError(f"group {header.group_id} is inconsistent ({error}); its producer has a bug") from None
    return RolloutGroup(
        group_id=header.group_id,
        index=header.index,
        domain=header.domain,
        actor=header.actor,
        rollouts=rollouts,
        problem=header.problem,
        refusal=header.refusal,
        issued_at=header.issued_at,
        engines=header.engines,
    )


def _with_experts(header: _GroupHeader, columns: memoryview, turns: list[Turn]) -> list[Turn]:
    """Add routed experts to the turns. Raises `ValueError` if the columns of turns and contexts do not match."""
    arrays = _additional_columns(header, columns)
    sampled, contexts = arrays.get(SAMPLED_EXPERTS), arrays.get(CONTEXT_EXPERTS)
    if sampled is None and contexts is None:
        return turns
    if sampled is None or contexts is None:
        raise ValueError("routed experts need both columns, of sampled tokens and of contexts")
    for column in (sampled, contexts):
        if column.ndim != 3 or column.dtype not in _EXPERTS or column.dtype != sampled.dtype:
            raise ValueError(f"routed experts must be u8 or u16 [tokens, layers, top_k], not {column.dtype}")
        if column.shape[1:] != sampled.shape[1:]:
            shapes = f"{sampled.shape[1:]} and {column.shape[1:]}"
            raise ValueError(f"routed experts must have the same [layers, top_k], got {shapes}")
    of_turns, of_contexts = _parts(sampled, _turn_lengths(header)), _parts(contexts, header.context_lengths)
    return [
        replace(turn, routed_experts=own, context_routed_experts=of_contexts[number])
        for turn, own, number in zip(turns, of_turns, header.turn_contexts, strict=True)
    ]


def _additional_columns(header: _GroupHeader, columns: memoryview) -> dict[str, NDArray[Any]]:
    num_context, num_tokens = sum(header.context_lengths), sum(_turn_lengths(header))
    start = _padded(4 * num_context) + 2 * _padded(4 * num_tokens)
    found: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in header.columns:
        try:
            rows = num_context if name == CONTEXT_EXPERTS else num_tokens
            if shape[:1] != (rows,) or min(shape) < 0:
                raise ValueError(f"its shape is {list(shape)}, for {rows} tokens")
            found[name] = np.frombuffer(columns, dtype, math.prod(shape), start).reshape(shape)
        except (TypeError, ValueError) as error:
            raise RecordError(f"the column {name!r} of group {header.group_id} is malformed: {error}") from None
        start += _padded(found[name].nbytes)
    return found


def encode_order(order: PromptOrder) -> bytes:
    """Encode an order, the controller's request for a group. Raises `RecordError` if its metadata is not plain data."""
    return _seal(Kind.ORDER, order)


def decode_order(record: bytes) -> PromptOrder:
    """Decode an order for a prompt. Raises `RecordError`."""
    header, _ = _open(record, Kind.ORDER)
    return _parse(_order_decoder, header)


def named_order(record: bytes) -> int | None:
    """Return the index of the order that a group record, perhaps damaged after its header, answers; else None."""
    if len(record) < _PREFIX.size:
        return None
    magic, version, kind, _, header_size, _ = _PREFIX.unpack_from(record)
    if magic != _MAGIC or version not in _READ or kind != Kind.GROUP:
        return None
    try:
        return _parse(_group_decoder, memoryview(record)[_PREFIX.size : _PREFIX.size + header_size]).index
    except RecordError:
        return None


def encode_message(kind: str, body: Mapping[str, Any]) -> bytes:
    """Encode plain data (no arrays, no objects), such as a dead letter; reports are encoded by `messages.py`."""
    return _seal(Kind.MESSAGE, KindedMessage(kind, dict(body)))


def decode_message(record: bytes) -> KindedMessage:
    """Decode a message. Raises `RecordError`."""
    header, _ = _open(record, Kind.MESSAGE)
    return _parse(_message_decoder, header)


def _distinct_contexts(turns: list[Turn]) -> tuple[list[NDArray[np.int32]], list[int]]:
    """Return the distinct contexts, and for each turn the index of its context among them."""
    contexts: list[NDArray[np.int32]] = []
    by_identity: dict[int, int] = {}
    by_content: dict[bytes, int] = {}
    chosen: list[int] = []
    for turn in turns:
        context = turn.context_token_ids
        number = by_identity.get(id(context))
        if number is None:
            number = by_content.setdefault(context.tobytes(), len(contexts))
            by_identity[id(context)] = number
            if number == len(contexts):
                contexts.append(context)
        chosen.append(number)
    return contexts, chosen


def _distinct(values: list[_Value]) -> tuple[list[_Value], list[int]]:
    """Return the distinct values, and for each of `values` its index among the distinct ones."""
    numbers: dict[_Value, int] = {}
    chosen = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), chosen


def _expert_columns(turns: list[Turn], turn_contexts: list[int]) -> dict[str, NDArray[Any]]:
    """Return the columns of routed experts, if any; `RecordError` if turns lack them or shapes contradict."""
    if all(turn.routed_experts is None and turn.context_routed_experts is None for turn in turns):
        return {}
    firsts: dict[int, Turn] = {}
    for turn, number in zip(turns, turn_contexts, strict=True):
        firsts.setdefault(number, turn)
    sampled = [(turn.routed_experts, len(turn.token_ids)) for turn in turns]
    contexts = [(turn.context_routed_experts, len(turn.context_token_ids)) for _, turn in sorted(firsts.items())]
    arrays: list[Experts] = []
    for routed, length in (*sampled, *contexts):
        like = arrays[0] if arrays else routed
        if routed is None or like is None or routed.ndim != 3 or routed.dtype not in _EXPERTS or len(routed) != length:
            raise RecordError(
                "routed experts must be u8 or u16 [tokens, layers, top_k], for all turns and their contexts or for "
                f"none; got {'none' if routed is None else f'{routed.dtype} {routed.shape}'} for {length} tokens"
            )
        if (routed.dtype, routed.shape[1:]) != (like.dtype, like.shape[1:]):
            raise RecordError(
                f"routed experts must have the same [layers, top_k], got {like.shape[1:]} and {routed.shape[1:]}"
            )
        arrays.append(routed)
    return {
        SAMPLED_EXPERTS: np.concatenate(arrays[: len(turns)]),
        CONTEXT_EXPERTS: np.concatenate(arrays[len(turns) :]),
    }


def _spanned(spans: tuple[VersionSpan, ...]) -> int:
    return spans[0].num_tokens if len(spans) == 1 else sum(span.num_tokens for span in spans)


def _joined(name: str, arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Concatenate the arrays of a column, which must all have `dtype`: a conversion could silently wrap ids around."""
    try:
        joined = np.concatenate(arrays, dtype=dtype, casting="equiv") if arrays else np.empty(0, dtype)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{name} must be arrays of dtype {dtype.name} with one dimension: {error}") from None
    if joined.ndim != 1:
        raise RecordError(f"{name} must have one dimension, got {joined.ndim}")
    return joined


def _padded(size: int) -> int:
    return size + (-size % 8)


def _seal(kind: Kind, header: Any, arrays: Sequence[NDArray[Any]] = ()) -> bytes:
    try:
        packed = _encoder.encode(header)
    except (TypeError, OverflowError, ValueError) as error:
        raise RecordError(f"{_named(kind)} must be plain data to become a record: {error}") from None
    size = sum(_padded(array.nbytes) for array in arrays)
    parts: list[Any] = [_PREFIX.pack(_MAGIC, FORMAT, kind, 0, len(packed), size), packed, bytes(-len(packed) % 8)]
    for array in arrays:
        parts += (array.data if array.size else b"", bytes(-array.nbytes % 8))
    body = b"".join(parts)
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def _open(record: bytes, expected: Kind) -> tuple[memoryview, memoryview]:
    if len(record) < _PREFIX.size + _DIGEST.size:
        raise RecordError(
            f"a record has at least {_PREFIX.size + _DIGEST.size} bytes, got {len(record)}: it is truncated"
        )
    magic, version, kind, _, header_size, size = _PREFIX.unpack_from(record)
    if magic != _MAGIC:
        raise RecordError(f"a record begins with {_MAGIC!r}, got {magic!r}: this is something else")
    if version not in _READ:
        known = " and ".join(map(str, sorted(_READ)))
        raise RecordError(f"record of format {version}, but this program reads {known}; update the older of the two")
    start = _PREFIX.size + _padded(header_size)
    if len(record) != start + size + _DIGEST.size:
        raise RecordError(
            f"record of {start + size + _DIGEST.size} bytes has {len(record)}: it is truncated or damaged"
        )
    view = memoryview(record)
    if xxhash.xxh3_64_intdigest(view[: -_DIGEST.size]) != _DIGEST.unpack_from(record, start + size)[0]:
        raise RecordError("the digest of a record does not match its content: it is damaged")
    if kind != expected:
        came = next((_named(known) for known in Kind if known == kind), f"a record of the unknown kind {kind}")
        raise RecordError(f"expected {_named(expected)}, got {came}")
    return view[_PREFIX.size : _PREFIX.size + header_size], view[start : start + size]


def _turn_lengths(header: _GroupHeader) -> list[int]:
    lengths = [_spanned(spans) for spans in header.spans]
    return [lengths[number] for number in header.turn_spans]


def _named(kind: Kind) -> str:
    return {Kind.GROUP: "a group", Kind.ORDER: "an order", Kind.MESSAGE: "a message"}[kind]


def _parse(decoder: msgspec.msgpack.Decoder[_Header], header: memoryview) -> _Header:
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"the header of a record does not fit its kind: {error}") from None


def _rollouts(header: _GroupHeader, turns: list[Turn]) -> tuple[Rollout, ...]:
    ends = (0, *accumulate(header.rollout_turns))
    if ends[-1] != len(turns):
        raise ValueError(f"{len(turns)} turns, but its rollouts have {ends[-1]}")
    if ends[-1] == len(ends) - 1 and all(header.rollout_turns):
        turns_of: Sequence[tuple[Turn, ...]] = list(zip(turns))
    else:
        turns_of = [tuple(turns[first:last]) for first, last in pairwise(ends)]
    for own, its in zip(header.rollout_parents, turns_of, strict=bool(header.rollout_parents)):
        if own and (len(own) != len(its) or not all(ROOT <= parent < number for number, parent in enumerate(own))):
            raise ValueError(f"parents {own} for {len(its)} turns")
    verdicts = [Verdict(**finding._asdict()) for finding in header.findings]
    parents = header.rollout_parents or [()] * len(turns_of)
    endings = [header.endings[number] for number in header.rollout_endings]
    parts = zip(turns_of, header.rollout_findings, endings, parents, strict=True)
    return tuple(
        Rollout(
            turns=its,
            verdict=verdicts[finding],
            finish_reason=finish_reason,
            temperature=temperature,
            epoch=epoch,
            parents=own,
        )
        for its, finding, (finish_reason, temperature, epoch), own in parts
    )


def _split(columns: memoryview, dtype: np.dtype[Any], lengths: list[int], start: int) -> tuple[list[NDArray[Any]], int]:
    """Return views of the given lengths into the column at `start`, and the start of the next column."""
    if lengths and min(lengths) < 0:
        raise ValueError(f"a length of {min(lengths)}")
    column = np.frombuffer(columns, dtype, sum(lengths), start)
    return _parts(column, lengths), start + _padded(column.nbytes)


def _parts(column: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    return [column[first:last] for first, last in pairwise((0, *accumulate(lengths)))]
