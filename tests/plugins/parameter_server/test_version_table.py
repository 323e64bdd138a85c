"""The table of weight versions on a parameter server: when they are served and dropped, and reuse of their memory."""

import pytest
from hypothesis import given, strategies as st

from inference_contract.errors import DigestMismatch, LayoutMismatch, NotPrepared, Overloaded, StaleVersion
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.plugins.parameter_server.connection import Announcement
from pipelinerl.plugins.parameter_server.version_table import VersionTable, collectable, holders

LAYOUT = WeightLayout(parameters=(ParameterSpec(name="a", shape=(5,), dtype=DType.FLOAT32),))
WIDER = WeightLayout(parameters=(ParameterSpec(name="a", shape=(6,), dtype=DType.FLOAT32),))


def announce(table, version, *, epoch=1, layout=LAYOUT, **progress):
    return table.announce(Announcement(epoch=epoch, version=version, layout=layout, progress=progress))


def publish(table, version, *, epoch=1, **progress):
    announce(table, version, epoch=epoch, **progress)
    return table.seal((epoch, version), f"digest-{epoch}.{version}", "whole")


def held(table):
    return [version.key for version in table.versions()]


def test_weight_version_is_served_only_after_its_upload_is_complete():
    table = VersionTable(room=2)
    announce(table, 1)
    with pytest.raises(NotPrepared, match=r"1\.1 is not complete yet"):
        table.whole((1, 1))
    assert table.newest() is None
    table.seal((1, 1), "d", "whole")
    assert table.whole((1, 1)).digest == "d"
    with pytest.raises(NotPrepared, match=r"1\.2 is not held here; held: 1\.1"):
        table.whole((1, 2))


def test_repeated_announcement_or_completion_of_an_upload_has_no_effect():
    table = VersionTable(room=2)
    first = announce(table, 1)
    assert announce(table, 1).segment is first.segment
    publish(table, 1)
    assert announce(table, 1).digest == "digest-1.1"
    table.seal((1, 1), "digest-1.1", "whole")
    with pytest.raises(DigestMismatch, match=r"complete with digest digest-1\.1"):
        table.seal((1, 1), "other", "whole")
    with pytest.raises(LayoutMismatch, match="parameter 'a' must have shape"):
        announce(table, 1, layout=WIDER)


def test_memory_of_dropped_versions_is_reused_but_memory_of_unfinished_uploads_is_not():
    table = VersionTable(room=2)
    first = publish(table, 1).segment
    second = publish(table, 2).segment
    assert held(table) == [(1, 2)]
    assert announce(table, 3).segment is first
    unfinished = announce(table, 4).segment
    assert unfinished is not first, "the writer of version 3 may still be writing"
    table.seal((1, 4), "d", "whole")
    assert announce(table, 5).segment is second


def test_memory_of_a_dropped_version_is_not_reused_for_a_version_of_another_size():
    table = VersionTable(room=2)
    publish(table, 1)
    publish(table, 2)
    wider = announce(table, 3, layout=WIDER)
    assert wider.segment.num_bytes == len(wider.segment.bytes) == WIDER.num_bytes


def test_version_is_dropped_only_after_it_has_been_sent_or_saved():
    table = VersionTable(room=2)
    publish(table, 1)
    with table.using((1, 1)):
        publish(table, 2)
        assert held(table) == [(1, 1), (1, 2)]
        with pytest.raises(Overloaded, match=r"1\.1 is being sent or saved"):
            announce(table, 3)
    assert held(table) == [(1, 2)]


def test_parameter_server_rejects_a_trainer_once_a_trainer_of_a_later_epoch_has_announced_a_version():
    table = VersionTable(room=2)
    publish(table, 7, a=(1, 6))
    publish(table, 8, a=(1, 6))
    announce(table, 5, epoch=2, a=None)
    assert held(table) == [(1, 8), (2, 5)], (
        "the newest version of the earlier epoch must stay until a newer one is complete"
    )
    for refused in (lambda: announce(table, 9), lambda: table.confirm(1, {})):
        with pytest.raises(StaleVersion, match="epoch 2 has taken over from epoch 1"):
            refused()
    table.seal((2, 5), "d", "whole")
    assert held(table) == [(2, 5)]


def test_weight_version_older_than_the_newest_is_rejected():
    table = VersionTable(room=3)
    publish(table, 7)
    with pytest.raises(StaleVersion, match=r"must come after 1\.7"):
        announce(table, 6)


def test_parameter_server_with_room_for_a_single_version_is_rejected():
    with pytest.raises(ValueError, match="at least 2"):
        VersionTable(room=1)


keys = st.tuples(st.integers(1, 3), st.integers(0, 5))
histories = st.fixed_dictionaries(
    {
        "whole": st.sets(keys, max_size=6),
        "progress": st.dictionaries(st.sampled_from("abc"), st.none() | keys),
        "in_use": st.sets(keys, max_size=3),
    }
)


@pytest.mark.parametrize(
    ("whole", "progress", "collected"),
    [
        ({(1, 5)}, {}, set()),
        ({(1, 5)}, {"a": (1, 9)}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 5)}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 6)}, {(1, 5)}),
        ({(1, 5), (1, 6)}, {"a": (1, 6), "late": None}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 6), "behind": (1, 4)}, set()),
        ({(1, 5), (1, 6)}, {}, {(1, 5)}),
        ({(1, 5), (1, 6), (1, 7)}, {"a": (1, 6)}, {(1, 5)}),
    ],
)
def test_version_may_be_dropped_once_all_engines_and_replicas_have_newer_ones_and_one_is_complete(
    whole, progress, collected
):
    assert collectable(whole, progress, epoch=1, in_use=set()) == collected


@given(histories, st.integers(1, 4))
def test_version_that_an_engine_or_replica_needs_may_never_be_dropped(history, epoch):
    whole, progress, in_use = history["whole"], history["progress"], history["in_use"]
    assert isinstance(whole, set) and isinstance(progress, dict) and isinstance(in_use, set)
    gone = collectable(whole, progress, epoch=epoch, in_use=in_use)
    assert gone <= whole and not gone & in_use
    if whole:
        assert max(whole) not in gone
    for key in gone:
        if key[0] >= epoch:
            assert all(at is not None and at > key for at in progress.values())
    kept = whole - gone
    reasons = holders(kept, progress, epoch=epoch, in_use=in_use)
    assert len(reasons) == max(len(kept) - 1, 0), "every version that is kept, except the newest, must have a reason"
