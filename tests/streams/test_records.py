"""Records (binary stream entries) decode to what was encoded, detect flipped bits, and keep their fixed byte format."""

import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from pipelinerl.errors import RecordError
from pipelinerl.streams import records
from pipelinerl.streams.records import (
    Kind,
    KindedMessage,
    decode_group,
    decode_message,
    decode_order,
    encode_group,
    encode_message,
    encode_order,
)
from pipelinerl.types import (
    NO_NOTE,
    ROOT,
    Message,
    Outcome,
    Problem,
    ProblemSummary,
    PromptOrder,
    Purpose,
    RewardPart,
    Rollout,
    RolloutGroup,
    Sampling,
    Turn,
    TurnNote,
    Verdict,
    VersionSpan,
)
from tests.fakes.rollouts import group
from tests.fakes.routing import routed, routed_group


def ids(*values):
    return np.array(values, dtype=np.int32)


def turn(context, *tokens, version=7):
    return Turn(
        context_token_ids=context,
        token_ids=ids(*tokens),
        behavior_logprobs=np.array([-0.5 * token for token in tokens], dtype=np.float32),
        spans=(VersionSpan(version, len(tokens)),),
    )


def rollout(*turns, reward=1.0, outcome=Outcome.CORRECT):
    parts = (RewardPart("format", 1.0), RewardPart("right", reward)) if reward else ()
    verdict = Verdict(outcome=outcome, reward=reward, answer="2" if reward else "", parts=parts)
    return Rollout(turns=turns, verdict=verdict, finish_reason="stop", temperature=1.0, epoch=2)


PROMPT = ids(5, 6, 7)
GROUP = RolloutGroup(
    group_id="prompt-000123",
    index=123,
    domain="math",
    actor="a0",
    rollouts=(
        rollout(turn(PROMPT, 1, 2)),
        rollout(turn(PROMPT, 3), turn(ids(9), 4), reward=0.0, outcome=Outcome.WRONG),
    ),
    problem=ProblemSummary("gsm-1", ("level=3",), "2"),
)
ORDER = PromptOrder(
    order_id="prompt-000123",
    index=123,
    purpose=Purpose.TRAINING,
    problem=Problem(
        problem_id="gsm-1",
        domain="math",
        messages=(Message("user", "1 + 1 = ?"),),
        ground_truth="2",
        metadata={"level": 3},
        tags=("level=3",),
    ),
    sampling=Sampling(num_samples=16, stop=("\n",)),
    seed=42,
    chat_template_kwargs={"enable_thinking": False},
)

#: A group whose first rollout branches: two of its turns both continue its first turn, and the turn of another agent
#: has no turns before it. The second rollout has a single turn.
EPISODE = replace(
    GROUP,
    rollouts=(
        replace(
            rollout(
                replace(turn(PROMPT, 1, 2), note=TurnNote(0.0, "main", "first")),
                replace(turn(ids(8), 3), note=TurnNote(0.25, "main")),
                replace(turn(ids(9, 9), 4), note=TurnNote(0.0, "main", "forked")),
                replace(turn(PROMPT, 5), note=TurnNote(-1.0, "critic", "first")),
            ),
            parents=(ROOT, 0, 0, ROOT),
        ),
        rollout(turn(PROMPT, 6), reward=0.0, outcome=Outcome.WRONG),
    ),
)
MESSAGE = KindedMessage("step", {"step": 57, "loss": 0.25})
GOLDEN = {
    "group": (encode_group(GROUP), decode_group, GROUP),
    "episode": (encode_group(EPISODE), decode_group, EPISODE),
    "order": (encode_order(ORDER), decode_order, ORDER),
    "message": (encode_message(*MESSAGE), decode_message, MESSAGE),
}
GOLDEN_BYTES = {
    "group": (
        "504c524c05010000ae00000030000000dc0015ad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191"
        "a76c6576656c3d33a1329203019291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f72"
        "6d6174cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193a4"
        "73746f70cb3ff000000000000002930000019300010192010292000192000090a09090909200009000000500000006000000"
        "070000000900000001000000020000000300000004000000000000bf000080bf0000c0bf000000c0d5141854e433fb6c"
    ),
    "episode": (
        "504c524c050100001c01000048000000dc0015ad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191"
        "a76c6576656c3d33a132930301029291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f"
        "726d6174cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193"
        "a473746f70cb3ff00000000000000295000102000095000101010192040192000192000090a09593cb0000000000000000a4"
        "6d61696ea5666972737493cb3fd0000000000000a46d61696ea093cb0000000000000000a46d61696ea6666f726b656493cb"
        "bff0000000000000a6637269746963a5666972737493cb0000000000000000a0a09500010203049294ff0000ff9092000090"
        "0000000005000000060000000700000008000000090000000900000001000000020000000300000004000000050000000600"
        "0000000000bf000080bf0000c0bf000000c0000020c0000040c08a66ced2c64e45e5"
    ),
    "order": (
        "504c524c05020000380100000000000089a86f726465725f6964ad70726f6d70742d303030313233a5696e6465787ba77075"
        "72706f7365a8747261696e696e67a770726f626c656d86aa70726f626c656d5f6964a567736d2d31a6646f6d61696ea46d61"
        "7468a86d657373616765739192a475736572a931202b2031203d203fac67726f756e645f7472757468a132a86d6574616461"
        "746181a56c6576656c03a47461677391a76c6576656c3d33a873616d706c696e6786ab6e756d5f73616d706c657310ab7465"
        "6d7065726174757265cb3ff0000000000000a5746f705f70cb3ff0000000000000a5746f705f6b00aa6d61785f746f6b656e"
        "73cd0100a473746f7091a10aa4736565642aa6656e67696e65a0b4636861745f74656d706c6174655f6b776172677381af65"
        "6e61626c655f7468696e6b696e67c2a96973737565645f61749200006decb24f75d69442"
    ),
    "message": (
        "504c524c050300001b0000000000000092a47374657082a47374657039a46c6f7373cb3fd000000000000000000000003a94"
        "1cb6b98224e9"
    ),
}


#: `GROUP` in each earlier format; "2, without filters" was written before groups had a `refusal`.
OLD_GROUPS = {
    "2, without filters": (
        "504c524c02010000a4000000300000009fad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191a76c"
        "6576656c3d33a1329203019291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f726d61"
        "74cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193a47374"
        "6f70cb3ff0000000000000029300000193000101920102920001920000900000000005000000060000000700000009000000"
        "01000000020000000300000004000000000000bf000080bf0000c0bf000000c0586e40d355cf2352"
    ),
    "2": (
        "504c524c02010000a700000030000000dc0010ad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191"
        "a76c6576656c3d33a1329203019291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f72"
        "6d6174cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193a4"
        "73746f70cb3ff000000000000002930000019300010192010292000192000090a00005000000060000000700000009000000"
        "01000000020000000300000004000000000000bf000080bf0000c0bf000000c03a6cda053c5d76fa"
    ),
    "3": (
        "504c524c03010000aa00000030000000dc0013ad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191"
        "a76c6576656c3d33a1329203019291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f72"
        "6d6174cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193a4"
        "73746f70cb3ff000000000000002930000019300010192010292000192000090a09090900000000000000500000006000000"
        "070000000900000001000000020000000300000004000000000000bf000080bf0000c0bf000000c024dba4cad4f0d425"
    ),
    "4": (
        "504c524c04010000ad00000030000000dc0014ad70726f6d70742d3030303132337ba46d617468a2613093a567736d2d3191"
        "a76c6576656c3d33a1329203019291920702919207019295a7636f7272656374cb3ff0000000000000a0a1329292a6666f72"
        "6d6174cb3ff000000000000092a57269676874cb3ff000000000000095a577726f6e67cb0000000000000000a0a0909193a4"
        "73746f70cb3ff000000000000002930000019300010192010292000192000090a09090909200000000000500000006000000"
        "070000000900000001000000020000000300000004000000000000bf000080bf0000c0bf000000c0c0b3846245e0679f"
    ),
}


def plain(value):
    """Replace arrays by (dtype, shape, bytes), so that values can be compared: NaN equals NaN, 1 differs from 1.0."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, tuple):
        return (type(value).__name__, *(plain(item) for item in value))
    if hasattr(value, "__dataclass_fields__"):
        return (type(value).__name__, *((name, plain(getattr(value, name))) for name in value.__dataclass_fields__))
    return (type(value).__name__, value)


# --- round trips -----------------------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=False).map(
    lambda value: value + 0.0
)  # + 0.0, because records do not keep the sign of zero
INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def any_turn(draw, contexts):
    spans = draw(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 4)), max_size=4))
    length = sum(count for _, count in spans)
    return Turn(
        context_token_ids=draw(st.sampled_from(contexts)),
        token_ids=np.array(draw(st.lists(INT32, min_size=length, max_size=length)), dtype=np.int32),
        behavior_logprobs=np.array(
            draw(st.lists(st.floats(width=32), min_size=length, max_size=length)), dtype=np.float32
        ),
        spans=tuple(VersionSpan(*span) for span in spans),
        note=draw(st.sampled_from([NO_NOTE, TurnNote(0.25, "main"), TurnNote(-1.0, "main", "first")])),
    )


@st.composite
def any_rollout(draw, contexts, verdicts):
    turns = tuple(draw(st.lists(any_turn(contexts), max_size=3)))
    parents = st.tuples(*(st.integers(ROOT, number - 1) for number in range(len(turns))))
    return Rollout(
        turns=turns,
        verdict=draw(verdicts),
        finish_reason=draw(st.text(max_size=5)),
        temperature=draw(FLOATS),
        epoch=draw(st.integers(0, 2**40)),
        parents=draw(st.just(()) | parents),
    )


@st.composite
def any_group(draw):
    drawn = draw(st.lists(st.lists(INT32, max_size=5), min_size=1, max_size=3))
    contexts = [np.array(context, dtype=np.int32) for context in drawn]
    verdicts = st.builds(Verdict, outcome=st.sampled_from(Outcome), reward=FLOATS, reason=st.text(max_size=5))
    rollouts = any_rollout(contexts, verdicts)
    return RolloutGroup(
        group_id=draw(st.text(max_size=20)),
        index=draw(st.integers(0, 2**53 - 1)),
        domain=draw(st.text(max_size=5)),
        actor=draw(st.text(max_size=5)),
        rollouts=tuple(draw(st.lists(rollouts, max_size=4))),
        refusal=draw(st.text(max_size=5)),
    )


@given(any_group())
@settings(max_examples=150, deadline=None)
def test_rollout_group_is_unchanged_after_encoding_and_decoding(group):
    assert plain(decode_group(encode_group(group))) == plain(group)


PLAIN_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(max_size=10), st.dictionaries(st.text(max_size=5), PLAIN_DATA, max_size=4))
@settings(max_examples=100, deadline=None)
def test_message_is_unchanged_after_encoding_and_decoding(kind, body):
    assert decode_message(encode_message(kind, body)) == (kind, body)


@given(
    st.builds(
        PromptOrder,
        index=st.integers(0, 2**40),
        problem=st.builds(
            Problem,
            messages=st.lists(st.builds(Message), max_size=3).map(tuple),
            metadata=st.dictionaries(st.text(max_size=5), PLAIN_DATA, max_size=3),
        ),
        sampling=st.builds(
            Sampling,
            num_samples=st.integers(1, 100),
            temperature=FLOATS,
            top_p=FLOATS,
            top_k=st.integers(0, 100),
            max_tokens=st.integers(1, 2**20),
            stop=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        ),
        seed=st.integers(0, 2**63 - 1),
    )
)
@settings(max_examples=100, deadline=None)
def test_request_to_sample_a_prompt_is_unchanged_after_encoding_and_decoding(order):
    decoded = decode_order(encode_order(order))
    assert decoded == order
    assert isinstance(decoded.problem.messages[:1], tuple)
    assert type(decoded.purpose) is Purpose


def test_arrays_of_a_decoded_record_are_aligned_and_read_only():
    group = decode_group(encode_group(GROUP))
    for each in group.rollouts:
        for part in each.turns:
            for array in (part.context_token_ids, part.token_ids, part.behavior_logprobs):
                assert array.flags.aligned
                assert not array.flags.writeable


def test_prompt_shared_by_all_rollouts_is_stored_once_in_a_group_record():
    def size(prompts):
        rollouts = tuple(rollout(turn(prompt, 1, 2, 3)) for prompt in prompts)
        return len(encode_group(replace(GROUP, rollouts=rollouts)))

    prompt = np.arange(1000, dtype=np.int32)
    same = size([prompt] * 16)
    assert size([prompt.copy() for _ in range(16)]) == same
    assert size([prompt + number for number in range(16)]) > same + 15 * 4000


# --- invalid records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GOLDEN)
def test_every_flipped_bit_truncation_and_extension_of_a_record_is_detected(kind):
    record, decode, _ = GOLDEN[kind]
    flipped = (
        bytes([*record[:place], record[place] ^ 1 << bit, *record[place + 1 :]])
        for place in range(len(record))
        for bit in range(8)
    )
    for damaged in (*flipped, *(record[:length] for length in range(len(record))), record + b"\0"):
        with pytest.raises(RecordError):
            decode(damaged)


def sealed(kind, header, columns=b"", *, version=records.FORMAT):
    """Return a record whose digest is correct, although its header and columns may be invalid."""
    packed = msgspec.msgpack.encode(header)
    prefix = struct.pack("<4sBBHII", b"PLRL", version, kind, 0, len(packed), len(columns))
    body = prefix + packed + bytes(-len(packed) % 8) + columns
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@pytest.mark.parametrize(
    ("record", "decode", "reason"),
    [
        (GOLDEN["order"][0], decode_group, "expected a group, got an order"),
        (sealed(77, {}), decode_message, "unknown kind 77"),
        (sealed(Kind.MESSAGE, ["x", {}], version=9), decode_message, "format 9, but this program reads 2 and 3"),
        (b"\x80\x04pickled, perhaps, and long enough", decode_message, "this is something else"),
    ],
)
def test_record_of_another_kind_or_format_is_rejected(record, decode, reason):
    with pytest.raises(RecordError, match=reason):
        decode(record)


@pytest.mark.parametrize(
    "header", [None, 5, {}, ["x"], ["x", 1], [1, {}], ["x", {1: 2}]], ids=lambda header: repr(header)
)
def test_record_whose_header_lacks_the_structure_of_its_kind_is_rejected(header):
    with pytest.raises(RecordError, match="header of a record does not fit its kind"):
        decode_message(sealed(Kind.MESSAGE, header))


def group_header(**changes):
    """Return the header of a group with one rollout of one turn with 2 context and 2 sampled tokens.

    Each of the three columns of such a group has 8 bytes.
    """
    header = {
        "group_id": "g", "index": 0, "domain": "d", "actor": "a", "problem": ["", [], ""], "context_lengths": [2],
        "spans": [[[0, 2]]], "findings": [["correct", 1.0, "", "", []]], "endings": [["stop", 1.0, 0]],
        "turn_contexts": [0], "turn_spans": [0], "rollout_turns": [1], "rollout_findings": [0],
        "rollout_endings": [0], "columns": [], "refusal": "", "notes": [], "turn_notes": [], "rollout_parents": [],
    }  # fmt: skip
    return list((header | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"context_lengths": [300]}, {"context_lengths": [-2]}, {"turn_contexts": [1]}, {"turn_contexts": [0, 0]},
        {"spans": [[[0, -2]]]}, {"spans": [[[0, 200]]]}, {"spans": []}, {"turn_spans": []}, {"turn_spans": [-3]},
        {"rollout_turns": [2]}, {"rollout_turns": []}, {"rollout_findings": [3]}, {"rollout_endings": []},
        {"findings": [["maybe", 1.0, "", "", []]]}, {"findings": [["correct", 1.0, ""]]}, {"turn_notes": [0]},
        {"notes": [[0.5, "main", ""]], "turn_notes": [0, 0]}, {"rollout_parents": [[0]]},
        {"rollout_parents": [[-2]]}, {"rollout_parents": [[-1, 0]]}, {"rollout_parents": [[-1], [-1]]},
    ],
    ids=lambda changes: repr(changes),
)  # fmt: skip
def test_inconsistent_group_record_is_rejected(changes):
    assert decode_group(sealed(Kind.GROUP, group_header(), bytes(24))).num_tokens == 4
    with pytest.raises(RecordError, match=r"is inconsistent|does not fit its kind"):
        decode_group(sealed(Kind.GROUP, group_header(**changes), bytes(24)))


@pytest.mark.parametrize(
    "column", [["x", "O", [2]], ["x", "<f8", [3]], ["x", "nonsense", [2]], ["x", "<i4", [-3]], ["x", "<i4", [2, -1]]]
)
def test_group_record_with_a_malformed_extra_column_is_rejected(column):
    with pytest.raises(RecordError, match=r"column 'x' of group .* is malformed"):
        decode_group(sealed(Kind.GROUP, group_header(columns=[column]), bytes(40)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": np.array([1, 2], dtype=np.int64)}, "token_ids must be arrays of dtype int32"),
        (
            {"behavior_logprobs": np.array([1, 2], dtype=np.float64)},
            "behavior_logprobs must be arrays of dtype float32",
        ),
        ({"context_token_ids": ids(1, 2).reshape(1, 2)}, "context_token_ids must have one dimension"),
        ({"behavior_logprobs": np.ones(1, np.float32)}, "one log-probability for each token"),
        ({"spans": (VersionSpan(0, 1),)}, "spans that sum"),
        ({"spans": ()}, "spans that sum"),
    ],
)
def test_group_with_wrong_dtypes_or_inconsistent_lengths_is_rejected_when_it_is_encoded(changes, reason):
    bad = replace(GROUP, rollouts=(rollout(replace(turn(PROMPT, 1, 2), **changes)),))
    with pytest.raises(RecordError, match=reason):
        encode_group(bad)


@pytest.mark.parametrize("value", [object(), 2**70, ids(1), {1, object()}])
def test_message_values_that_are_not_plain_data_are_rejected(value):
    with pytest.raises(RecordError, match="plain data"):
        encode_message("m", {"x": value})


# --- routed experts ---------------------------------------------------------------------------------------------------


def turns(of):
    return [turn for rollout in of.rollouts for turn in rollout.turns]


def test_routed_experts_of_each_turn_are_unchanged_after_encoding_and_decoding():
    several = Rollout(
        turns=tuple(routed(turn, layers=3, top_k=2, seed=9) for turn in (*turns(group(0)), *turns(group(0)))),
        verdict=group(0).rollouts[0].verdict,
        finish_reason="stop",
        temperature=1.0,
    )
    given = routed_group(3, layers=3, top_k=2)
    given = replace(given, rollouts=(*given.rollouts, several))
    firsts = {}
    for turn in turns(given):
        firsts.setdefault(turn.context_token_ids.tobytes(), turn.context_routed_experts)
    for before, after in zip(turns(given), turns(decode_group(encode_group(given))), strict=True):
        np.testing.assert_array_equal(after.routed_experts, before.routed_experts)
        np.testing.assert_array_equal(after.context_routed_experts, firsts[before.context_token_ids.tobytes()])
        assert after.routed_experts is not None and after.routed_experts.dtype == np.uint8


def test_routed_experts_of_a_shared_prompt_are_stored_once():
    bare, given = group(3, rewards=(0.0,) * 8), routed_group(3, rewards=(0.0,) * 8, layers=4, top_k=8)
    added = len(encode_group(given)) - len(encode_group(bare))
    tokens = 8 * 2 + 2  # eight answers of 2 tokens, and one shared prompt of 2 tokens
    assert tokens * 32 <= added <= tokens * 32 + 100, f"{added} bytes for {tokens} tokens"


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_experts": None},
        {"context_routed_experts": None},
        {"routed_experts": np.zeros((3, 2, 2), np.uint8)},
        {"routed_experts": np.zeros((2, 2, 3), np.uint8)},
        {"routed_experts": np.zeros((2, 4), np.uint8)},
        {"routed_experts": np.zeros((2, 2, 2), np.int64)},
        {"routed_experts": np.zeros((2, 2, 2), np.uint16)},
    ],
)
def test_routed_experts_with_a_wrong_shape_are_rejected_when_a_group_is_encoded(changes):
    given = routed_group(3)
    second = replace(given.rollouts[1], turns=(replace(given.rollouts[1].turns[0], **changes),))
    rollouts = (second, given.rollouts[0])  # of a shared prompt, only the first copy is stored
    with pytest.raises(RecordError, match="routed experts"):
        encode_group(replace(given, rollouts=rollouts))


@pytest.mark.parametrize(
    "columns",
    [
        [("routed_experts", "|u1", (2, 2, 2))],
        [("context_routed_experts", "|u1", (2, 2, 2))],
        [("routed_experts", "|u1", (2, 2, 2)), ("context_routed_experts", "|u1", (2, 2, 3))],
        [("routed_experts", "|u1", (2, 2, 2)), ("context_routed_experts", "<u2", (2, 2, 2))],
        [("routed_experts", "<f4", (2, 2, 2)), ("context_routed_experts", "<f4", (2, 2, 2))],
        [("routed_experts", "|u1", (2, 4)), ("context_routed_experts", "|u1", (2, 4))],
    ],
)
def test_group_record_with_contradictory_columns_of_routed_experts_is_rejected(columns):
    good = [("routed_experts", "|u1", (2, 2, 2)), ("context_routed_experts", "|u1", (2, 2, 2))]
    decoded = decode_group(sealed(Kind.GROUP, group_header(columns=good), bytes(40)))
    assert [turn.routed_experts.shape for turn in turns(decoded) if turn.routed_experts is not None] == [(2, 2, 2)]
    with pytest.raises(RecordError, match=r"is inconsistent .*routed experts"):
        decode_group(sealed(Kind.GROUP, group_header(columns=columns), bytes(88)))


# --- golden bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_records_are_encoded_and_decoded_byte_for_byte(kind):
    """Later versions must be able to read records on disk: if these bytes change, the record needs a new `FORMAT`."""
    record, decode, value = GOLDEN[kind]
    assert record.hex() == GOLDEN_BYTES[kind]
    assert plain(decode(bytes.fromhex(GOLDEN_BYTES[kind]))) == plain(value)


@pytest.mark.parametrize("record", OLD_GROUPS.values(), ids=OLD_GROUPS)
def test_group_records_of_earlier_formats_are_decoded_with_defaults_for_missing_fields(record):
    assert plain(decode_group(bytes.fromhex(record))) == plain(GROUP)
