"""The nodes' records, and a node that finds no launch to serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from launch.cluster import node
from launch.cluster.membership import (
    SILENCE_S,
    LaunchRecord,
    Members,
    NodeFile,
    NodeState,
    OtherNodes,
    ended,
    folder_of,
    node_path,
    read_launch,
    read_members,
    write_launch,
    write_members,
)
from launch.cluster.node import serve_share
from launch.hosts import Host, numbered_devices
from launch.run_directory import create
from launch.supervisor import RunOutcome, RunResult
from pipelinerl.config.recipe import parse
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RestartStatus

MEMBERS = Members(
    hosts=(Host(name="a", address="10.0.0.1", devices=numbered_devices(2)), Host(name="b", address="10.0.0.2")),
    first_port=21000,
)
LAUNCH = LaunchRecord(id="one", members=MEMBERS)


def test_members_and_launches_are_unchanged_after_writing_and_reading(tmp_path: Path) -> None:
    assert read_members(tmp_path) is None and read_launch(tmp_path) is None
    write_members(tmp_path, MEMBERS)
    write_launch(tmp_path, LAUNCH)
    assert read_members(tmp_path) == MEMBERS and read_launch(tmp_path) == LAUNCH
    over = ended(LAUNCH, RunResult(RunOutcome.FAILED, "no room"))
    write_launch(tmp_path, over)
    assert read_launch(tmp_path) == over
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder_of(tmp_path).iterdir())


def test_error_for_a_damaged_file_names_the_file(tmp_path: Path) -> None:
    write_members(tmp_path, MEMBERS)
    (folder_of(tmp_path) / "hosts.json").write_text('{"hosts": []')
    with pytest.raises(UserError, match=r"hosts\.json cannot be read.*with --host"):
        read_members(tmp_path)
    (folder_of(tmp_path) / "launch.json").write_text("{")
    assert read_launch(tmp_path) is None, "it may be under way on a file system that shows files late"


def test_node_is_up_while_its_file_keeps_changing(tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir()
    node, others = NodeFile(tmp_path, "b", "one"), OtherNodes(tmp_path, "one", ["b"])
    others.read(100.0)
    assert others.up(100.0) == frozenset()
    node.tell(NodeState.UP)
    others.read(101.0)
    others.read(101.0 + SILENCE_S)
    assert others.up(101.0 + SILENCE_S) == {"b"}
    assert others.up(101.5 + SILENCE_S) == frozenset(), "it has not changed since"
    node.tell(NodeState.UP)
    others.read(200.0)
    assert others.up(200.0) == {"b"}
    node.tell(NodeState.LEFT)
    others.read(201.0)
    assert others.up(201.0) == frozenset() and others.failure() is None


def test_node_of_another_launch_is_ignored(tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir()
    others = OtherNodes(tmp_path, "two", ["b"])
    NodeFile(tmp_path, "b", "one").tell(NodeState.FAILED, "engine-0 ended")
    others.read(1.0)
    assert others.failure() is None
    NodeFile(tmp_path, "b", "two").tell(NodeState.FAILED, "engine-0 ended")
    others.read(2.0)
    assert others.failure() == "on host b: engine-0 ended"


def test_restarts_on_other_nodes_are_reported(tmp_path: Path) -> None:
    folder_of(tmp_path).mkdir()
    died = (RestartStatus(name="engine-1", deaths=2, unforgiven=1.0, limit=3),)
    NodeFile(tmp_path, "b", "one").tell_restarts(died)
    others = OtherNodes(tmp_path, "one", ["b"])
    others.read(1.0)
    assert others.restarts() == died


def test_unwritable_node_state_is_ignored(tmp_path: Path) -> None:
    NodeFile(tmp_path, "b", "one").tell(NodeState.UP)  # fails, because the folder is missing
    assert not node_path(tmp_path, "b").exists()


def test_node_without_a_launch_fails_and_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"host b waited 0 s .*pipelinerl run --resume {tmp_path}"):
        serve_share(tmp_path, "b", head_s=0.0)
    write_launch(tmp_path, ended(LAUNCH, RunResult(RunOutcome.STOPPED, "suspended")))
    with pytest.raises(UserError, match="waited 0 s"):
        serve_share(tmp_path, "b", head_s=0.0)


def test_waiting_node_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(node, "_SILENT_S", 0.0)
    with pytest.raises(UserError):
        serve_share(tmp_path, "b", announce=said.append, head_s=0.05)
    assert said[0] == f"host b waits for a launch of the run in {tmp_path}, 0.05 s at most"


def test_node_started_after_the_run_has_ended_exits_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    write_launch(tmp_path, ended(LAUNCH, RunResult(RunOutcome.COMPLETED, "completed")))
    assert serve_share(tmp_path, "b", announce=said.append, head_s=0.0) == 0
    assert said == ["the run is over: completed"]


def test_node_for_a_host_that_is_unknown_or_already_served_is_rejected(tmp_path: Path) -> None:
    config = parse(
        {
            "model": {"path": "m"},
            "domains": [{"name": "d", "source": "s"}],
            "engine": {"type": "bigram"},
            "trainer": {"type": "bigram"},
            "run": {"name": "x", "directory": str(tmp_path)},
        }
    )
    run_dir = create(config).path
    write_launch(run_dir, LAUNCH)
    with pytest.raises(UserError, match="no host 'c'; its hosts are a, b"):
        serve_share(run_dir, "c", head_s=0.0)
    with (
        FileLock(folder_of(run_dir) / "node-b.lock", fallback_to_soft=False),
        pytest.raises(UserError, match="another node serves host b"),
    ):
        serve_share(run_dir, "b", head_s=0.0)
