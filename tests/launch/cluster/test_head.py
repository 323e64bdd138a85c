"""The head of a run on several hosts reads the other nodes' records and tells them how the run ended."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from launch.cluster.head import HeadNode
from launch.cluster.membership import Members, NodeFile, NodeState, read_launch, write_members
from launch.hosts import read_hosts
from launch.plan import Launch, Plan, ProcessSpec
from launch.supervisor import RunOutcome, RunResult, Supervisor
from pipelinerl.config.recipe import parse
from pipelinerl.observability.status import RestartStatus, read_restarts
from pipelinerl.roles.role import OnExit
from tests.patience import PATIENCE_S, SOON_S

DONE = RunResult(RunOutcome.COMPLETED, "completed")


def _launch(run_dir: Path, grace_s: float) -> tuple[Launch, Members]:
    engine = {"type": "bigram", "count": 2}
    table = {"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], "engine": engine}
    config = parse({**table, "trainer": {"type": "bigram"}, "launch": {"grace_s": grace_s}})
    members = Members(hosts=read_hosts(config, ["a", "b"], count=None, gpus=None))
    (run_dir / "tokens.json").write_text(json.dumps({"token": "of this launch"}))
    write_members(run_dir, members)
    return members.launch(config, run_dir), members


def _head(run_dir: Path, said: list[str], *, grace_s: float = PATIENCE_S) -> tuple[HeadNode, str]:
    """Return a head that has recorded a new launch, and the launch's id."""
    launch, members = _launch(run_dir, grace_s)
    head = HeadNode(launch, members, said.append)
    head.begin()
    record = read_launch(run_dir)
    assert record is not None and record.members == members and record.result is None
    return head, record.id


def test_launch_id_does_not_reveal_the_token(tmp_path: Path) -> None:
    said: list[str] = []
    _, id = _head(tmp_path, said)
    assert said == [f"waiting for host b: pipelinerl node {tmp_path} --name b"]
    assert "of this launch" not in (tmp_path / "cluster" / "launch.json").read_text() and len(id) == 16


def test_failure_of_a_host_ends_the_run_and_names_the_host(tmp_path: Path) -> None:
    said: list[str] = []
    head, id = _head(tmp_path, said)
    NodeFile(tmp_path, "b", id).tell(NodeState.FAILED, "engine-0 ended (exit status 2)")
    sleep = ("python3", "-S", "-E", "-c", "import time; time.sleep(600)")
    supervisor = Supervisor(
        Plan((ProcessSpec(name="controller", argv=sleep, on_exit=OnExit.COMPLETE),)),
        tmp_path,
        grace_s=SOON_S,
        announce=said.append,
        on_tick=lambda: head.follow(supervisor),
        on_end=head.end,
        tell_restarts=head.tell_restarts,
    )
    result = supervisor.run()
    assert result == RunResult(RunOutcome.FAILED, "on host b: engine-0 ended (exit status 2)")
    record = read_launch(tmp_path)
    assert record is not None and record.result == result, "the other hosts stop for the same reason"


def test_other_nodes_stop_before_the_head(tmp_path: Path) -> None:
    said: list[str] = []
    head, id = _head(tmp_path, said)
    node = NodeFile(tmp_path, "b", id)
    node.tell(NodeState.UP)
    order: list[str] = []

    def follow() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while ((record := read_launch(tmp_path)) is None or record.result is None) and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("b")
        node.tell(NodeState.ENDED)

    other = threading.Thread(target=follow)
    other.start()
    head.end(DONE)
    order.append("a")
    other.join(PATIENCE_S)
    assert order == ["b", "a"]
    assert not any("did not stop" in line for line in said)


def test_node_that_does_not_stop_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    head, id = _head(tmp_path, said, grace_s=0.01)
    NodeFile(tmp_path, "b", id).tell(NodeState.UP)
    head.end(DONE)
    assert said[-1] == "b did not stop in time; stopping the head"


def test_restarts_on_all_hosts_are_written_to_one_file(tmp_path: Path) -> None:
    head, id = _head(tmp_path, [])
    own, others = (RestartStatus(name=name, deaths=1, unforgiven=1.0, limit=3) for name in ("trainer", "engine-0"))
    NodeFile(tmp_path, "b", id).tell_restarts((others,))
    supervisor = Supervisor(Plan(()), tmp_path)
    head.follow(supervisor)
    head.tell_restarts((own,))
    assert [each.name for each in read_restarts(tmp_path)] == ["trainer", "engine-0"]


def test_run_on_one_machine_writes_no_records(tmp_path: Path) -> None:
    launch, _ = _launch(tmp_path, SOON_S)
    (tmp_path / "cluster" / "hosts.json").unlink()
    head = HeadNode(launch, None, pytest.fail)
    head.begin()
    head.follow(Supervisor(Plan(()), tmp_path))
    head.end(DONE)
    assert not head.leads and not list((tmp_path / "cluster").iterdir())
