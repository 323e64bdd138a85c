"""Manifests of checkpoints are read as they were written, including those of older versions with fewer fields."""

import pytest

from pipelinerl.errors import CheckpointError
from pipelinerl.training.checkpoints.manifest import Manifest, TrainingState

STATE = TrainingState(model_version=3, epoch=1, offsets={"identity": "x"}, ledger={"frontier": 3}, controller={})
#: A manifest that was written before the field `lineage` was added.
OLDER = b"""{
 "format": 2,
 "state": {
  "model_version": 3,
  "epoch": 1,
  "offsets": {
   "identity": "x"
  },
  "ledger": {
   "frontier": 3
  },
  "controller": {},
  "kl_coefficient": null
 },
 "files": {
  "config.json": "00000000000000000000000000000000"
 },
 "digest": "569ec9d644c1cf2a5dfdb5c0f44b5442"
}"""


def test_checkpoint_manifest_from_before_the_field_lineage_was_added_can_be_read():
    manifest = Manifest.parse(OLDER, where="here")
    assert manifest.state == STATE and manifest.state.epochs == []
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        Manifest.parse(OLDER.replace(b'"frontier": 3', b'"frontier": 4'), where="here")
