"""Snapshots of weights, in a directory or at a URL: reading a snapshot gives the saved bytes or an error."""

import numpy as np
import pytest

from pipelinerl.errors import CheckpointError
from pipelinerl.plugins.parameter_server.connection import ShardSpec
from pipelinerl.plugins.parameter_server.version_table import SnapshotStore, VersionSnapshot
from pipelinerl.weights.layout import WeightDigest
from tests.fakes.parameter_server import LAYOUT, digest, flat


@pytest.fixture(params=["directory", "memory"])
def place(request, tmp_path):
    return str(tmp_path / "copies") if request.param == "directory" else f"memory://{tmp_path.name}/copies"


def snapshot_of(key, shard=ShardSpec()):
    made = WeightDigest()
    for start, end in shard.ranges(LAYOUT):
        made.update(flat(key[1])[start:end])
    return VersionSnapshot(key=key, layout=LAYOUT, shard=shard, digest=made.hexdigest(), whole=digest(key[1]))


def save(store, key):
    store.save(snapshot_of(key), flat(key[1]))


def test_clearing_a_store_of_weight_snapshots_removes_only_its_own_snapshots(place):
    for name in ("mine", "theirs"):
        save(SnapshotStore(f"{place}/{name}"), (1, 9))
    SnapshotStore(f"{place}/mine").clear()
    assert [len(list(SnapshotStore(f"{place}/{name}").newest())) for name in ("mine", "theirs")] == [0, 1]


def test_newest_weight_snapshots_are_kept_and_read_back_bit_for_bit(place):
    for key in ((1, 9), (2, 3), (2, 10)):
        save(SnapshotStore(place, keep=2), key)
    first, second = SnapshotStore(place).newest()
    assert (first.key, second.key) == ((2, 10), (2, 3)), "the oldest of three, by (epoch, version), must be removed"
    assert first.layout == LAYOUT and first.digest == digest(10)
    into = np.zeros(LAYOUT.num_bytes, np.uint8)
    SnapshotStore(place).read(first, into)
    assert np.array_equal(into, flat(10))


def test_snapshots_of_all_shards_together_form_the_whole_weight_version(place):
    into = np.zeros(LAYOUT.num_bytes, np.uint8)
    for number in range(2):
        shard = ShardSpec(number=number, count=2, bucket_bytes=1000)
        store = SnapshotStore(f"{place}/{number}")
        store.save(snapshot_of((1, 4), shard), flat(4))
        (snapshot,) = store.newest()
        assert snapshot == snapshot_of((1, 4), shard)
        store.read(snapshot, into)
    assert np.array_equal(into, flat(4))


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damaged_weight_snapshot_is_rejected(tmp_path, damage):
    store = SnapshotStore(str(tmp_path))
    save(store, (1, 1))
    path = tmp_path / "1.1" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "lose":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    (snapshot,) = store.newest()
    with pytest.raises(CheckpointError, match=r"weights 1\.1 (have changed|cannot be read)"):
        store.read(snapshot, np.zeros(LAYOUT.num_bytes, np.uint8))


@pytest.mark.parametrize("manifest", [None, b"{", b"[]", b'{"format": 9}'])
def test_weight_snapshot_without_a_valid_manifest_is_skipped_with_a_log_entry(tmp_path, manifest, caplog):
    store = SnapshotStore(str(tmp_path))
    save(store, (1, 1))
    save(store, (1, 2))
    path = tmp_path / "1.2" / "manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_bytes(manifest)
    assert [snapshot.key for snapshot in store.newest()] == [(1, 1)]
    assert "skipping the snapshot 1.2" in caplog.text
