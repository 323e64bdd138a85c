"""The files through which the nodes of a run on several hosts share their state, and nodes that find no launch."""

import json
import threading
import time
from dataclasses import replace

import pytest
from filelock import FileLock

from launch.cluster import membership, node
from launch.cluster.node import serve_share
from launch.hosts import Host, numbered_devices, read_hosts
from launch.plan import Plan, ProcessSpec
from launch.run_directory import create
from launch.supervisor import RunOutcome, RunResult, Supervisor
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RestartStatus, read_restarts
from pipelinerl.roles.role import OnExit
from tests.launch.config import WITHOUT_GPUS, config_of
from tests.patience import PATIENCE_S, SOON_S, is_running

MEMBERS = membership.Members(
    hosts=(Host(name="a", address="10.0.0.1", devices=numbered_devices(2)), Host(name="b", address="10.0.0.2")),
    first_port=21000,
)
LAUNCH = membership.LaunchRecord(id="one", members=MEMBERS)


def test_cluster_members_and_launch_records_are_read_as_they_were_written(tmp_path):
    assert membership.read_members(tmp_path) is None and membership.read_launch(tmp_path) is None
    membership.write_members(tmp_path, MEMBERS)
    membership.write_launch(tmp_path, LAUNCH)
    assert membership.read_members(tmp_path) == MEMBERS and membership.read_launch(tmp_path) == LAUNCH
    over = replace(LAUNCH, result=RunResult(RunOutcome.FAILED, "no room"))
    membership.write_launch(tmp_path, over)
    assert membership.read_launch(tmp_path) == over
    assert all(path.stat().st_mode & 0o077 == 0 for path in membership.folder_of(tmp_path).iterdir())


def test_error_for_a_damaged_membership_file_names_the_file(tmp_path):
    membership.write_members(tmp_path, MEMBERS)
    (membership.folder_of(tmp_path) / "hosts.json").write_text('{"hosts": []')
    with pytest.raises(UserError, match=r"hosts\.json cannot be read.*with --node"):
        membership.read_members(tmp_path)
    (membership.folder_of(tmp_path) / "launch.json").write_text("{")
    assert membership.read_launch(tmp_path) is None, "the file may appear late on a shared file system"


def test_cluster_node_counts_as_up_while_its_state_file_keeps_changing(tmp_path):
    membership.folder_of(tmp_path).mkdir()
    node, others = membership.NodeFile(tmp_path, "b", "one"), membership.OtherNodes(tmp_path, "one", ["b"])
    others.read(100.0)
    assert others.up(100.0) == frozenset()
    node.tell(membership.NodeState.UP)
    others.read(101.0)
    others.read(101.0 + membership.SILENCE_S)
    assert others.up(101.0 + membership.SILENCE_S) == {"b"}
    assert others.up(101.5 + membership.SILENCE_S) == frozenset(), "the record has not changed since"
    node.tell(membership.NodeState.UP)
    others.read(200.0)
    assert others.up(200.0) == {"b"}
    node.tell(membership.NodeState.LEFT)
    others.read(201.0)
    assert others.up(201.0) == frozenset() and others.failure() is None


def test_state_file_that_a_cluster_node_wrote_for_another_launch_is_ignored(tmp_path):
    membership.folder_of(tmp_path).mkdir()
    others = membership.OtherNodes(tmp_path, "two", ["b"])
    membership.NodeFile(tmp_path, "b", "one").tell(membership.NodeState.FAILED, "engine-0 ended")
    others.read(1.0)
    assert others.failure() is None
    membership.NodeFile(tmp_path, "b", "two").tell(membership.NodeState.FAILED, "engine-0 ended")
    others.read(2.0)
    assert others.failure() == "on host b: engine-0 ended"


def test_cluster_node_that_finds_no_launch_fails_and_names_the_command_that_starts_one(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(node, "_SILENT_S", 0.0)
    membership.NodeFile(tmp_path, "b", "one").tell(membership.NodeState.UP)  # the folder is missing: no error
    with pytest.raises(UserError, match=rf"host b waited 0.05 s .*pipelinerl run --resume {tmp_path}"):
        serve_share(tmp_path, "b", announce=messages.append, head_s=0.05)
    assert messages[0] == f"host b waits for a launch of the run in {tmp_path}, 0.05 s at most"
    membership.write_launch(tmp_path, replace(LAUNCH, result=RunResult(RunOutcome.STOPPED, "suspended")))
    with pytest.raises(UserError, match="waited 0 s"):
        serve_share(tmp_path, "b", head_s=0.0)


def test_cluster_node_that_starts_after_the_run_has_ended_exits_without_waiting(tmp_path):
    messages = []
    membership.write_launch(tmp_path, replace(LAUNCH, result=RunResult(RunOutcome.COMPLETED, "completed")))
    assert serve_share(tmp_path, "b", announce=messages.append, head_s=0.0) == 0
    assert messages == ["the run is over: completed"]


def test_cluster_node_for_a_host_that_is_unknown_or_already_served_is_rejected(tmp_path):
    run_dir = create(config_of(**WITHOUT_GPUS, run={"name": "x", "directory": str(tmp_path)})).path
    membership.write_launch(run_dir, LAUNCH)
    with pytest.raises(UserError, match="no host 'c'; its hosts are a, b"):
        serve_share(run_dir, "c", head_s=0.0)
    with (
        FileLock(membership.folder_of(run_dir) / "node-b.lock", fallback_to_soft=False),
        pytest.raises(UserError, match="another node serves host b"),
    ):
        serve_share(run_dir, "b", head_s=0.0)


DONE = RunResult(RunOutcome.COMPLETED, "completed")


def _launch(run_dir, grace_s):
    config = config_of(**WITHOUT_GPUS | {"engine": {"type": "bigram", "count": 2}, "launch": {"grace_s": grace_s}})
    members = membership.Members(hosts=read_hosts(config, ["a", "b"], count=None, gpus=None))
    (run_dir / "tokens.json").write_text(json.dumps({"token": "of this launch"}))
    membership.write_members(run_dir, members)
    return members.launch(config, run_dir), members


def _head(run_dir, messages, *, grace_s=PATIENCE_S):
    launch, members = _launch(run_dir, grace_s)
    head = membership.HeadNode(launch, members, messages.append)
    head.begin()
    record = membership.read_launch(run_dir)
    assert record is not None and record.members == members and record.result is None
    return head, record.id


def test_launch_id_in_the_cluster_record_does_not_reveal_the_token(tmp_path):
    messages = []
    _, id = _head(tmp_path, messages)
    assert messages == [f"waiting for host b: pipelinerl node {tmp_path} --name b"]
    assert "of this launch" not in (tmp_path / "cluster" / "launch.json").read_text() and len(id) == 16


def test_failure_on_one_host_ends_the_run_with_a_message_that_names_the_host(tmp_path):
    messages, alive_at_end = [], []
    head, id = _head(tmp_path, messages)
    membership.NodeFile(tmp_path, "b", id).tell(membership.NodeState.FAILED, "engine-0 ended (exit status 2)")

    def follow():
        if supervisor.pids:
            head.follow(supervisor)

    def end(result):
        alive_at_end.extend(pid for pid in supervisor.pids.values() if is_running(pid))
        head.end(result)

    sleep = ("python3", "-S", "-E", "-c", "import time; time.sleep(600)")
    supervisor = Supervisor(
        Plan((ProcessSpec(name="controller", argv=sleep, on_exit=OnExit.COMPLETE),)),
        tmp_path,
        grace_s=SOON_S,
        announce=messages.append,
        on_tick=follow,
        on_end=end,
        tell_restarts=head.tell_restarts,
    )
    result = supervisor.run()
    assert result == RunResult(RunOutcome.FAILED, "on host b: engine-0 ended (exit status 2)")
    record = membership.read_launch(tmp_path)
    assert record is not None and record.result == result, "the other hosts stop for the same reason"
    assert len(alive_at_end) == 1 and not is_running(alive_at_end[0]), "they are told before the processes stop"


def test_other_cluster_nodes_stop_before_the_head_node(tmp_path):
    messages = []
    head, id = _head(tmp_path, messages)
    node = membership.NodeFile(tmp_path, "b", id)
    node.tell(membership.NodeState.UP)
    order = []

    def follow():
        deadline = time.monotonic() + PATIENCE_S
        while (
            (record := membership.read_launch(tmp_path)) is None or record.result is None
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("b")
        node.tell(membership.NodeState.ENDED)

    other = threading.Thread(target=follow)
    other.start()
    head.end(DONE)
    order.append("a")
    other.join(PATIENCE_S)
    assert order == ["b", "a"]
    assert not any("did not stop" in line for line in messages)


def test_cluster_node_that_does_not_stop_in_time_is_named(tmp_path):
    messages = []
    head, id = _head(tmp_path, messages, grace_s=0.01)
    membership.NodeFile(tmp_path, "b", id).tell(membership.NodeState.UP)
    head.end(DONE)
    assert messages[-1] == "b did not stop in time; stopping the head"


def test_process_restarts_on_all_hosts_are_written_to_one_file(tmp_path):
    head, id = _head(tmp_path, [])
    own, others = (RestartStatus(name=name, deaths=1, unforgiven=1.0, limit=3) for name in ("trainer", "engine-0"))
    membership.NodeFile(tmp_path, "b", id).tell_restarts((others,))
    supervisor = Supervisor(Plan(()), tmp_path)
    head.follow(supervisor)
    head.tell_restarts((own,))
    assert [each.name for each in read_restarts(tmp_path)] == ["trainer", "engine-0"]
