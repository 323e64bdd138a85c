"""Tests of the frequency of garbage collection during and after start-up."""

from __future__ import annotations

import gc

from pipelinerl.system.garbage import collect_as_usual, collect_rarely


def test_garbage_collection_is_rare_during_start_up_and_normal_afterwards() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_threshold()[0] > 10 * before[0] and gc.get_threshold()[1:] == before[1:]
        collect_as_usual()
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)
