"""Weight groups (torch process groups of trainer and engines) form, fail and re-form within their deadlines."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from inference_contract.weights import Connections
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast.collective import Rendezvous
from tests.fakes.groups import rank, ranks
from tests.patience import PATIENCE_S, SOON_S

#: Runs a test twice: with connections between all ranks, gloo's default, and with the tree that large groups use.
BOTH_WAYS = pytest.mark.parametrize("connections", [None, Connections.TREE])


@pytest.fixture
def rendezvous():
    return Rendezvous("127.0.0.1")


@BOTH_WAYS
def test_broadcast_in_a_weight_group_delivers_the_bytes(rendezvous, connections):
    root, leaf = ranks(rendezvous, connections=connections)
    sent, got = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    deadline = time.monotonic() + PATIENCE_S
    receiving = in_background("receive", lambda: leaf.broadcast(got, deadline=deadline))
    root.broadcast(sent, deadline=deadline)
    receiving.result(PATIENCE_S)
    assert torch.equal(sent, got)


def test_weight_group_connected_as_a_tree_has_fewer_connections_than_a_full_mesh(rendezvous):
    gc.collect()  # closes the connections of earlier tests' groups, which would be counted
    before = _open_files()
    tree = ranks(rendezvous, 9, connections=Connections.TREE)
    with_tree = _open_files()
    mesh = ranks(rendezvous, 9, generation=2)
    # The tree has 8 connections, the mesh 36. This process has both ends of each connection among its open files.
    assert with_tree - before < _open_files() - with_tree
    assert len(tree) == len(mesh) == 9


def _open_files():
    return len(os.listdir("/proc/self/fd"))


@BOTH_WAYS
def test_joining_a_weight_group_with_a_missing_rank_fails_at_the_deadline(rendezvous, connections):
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"joining group 'g' generation 1 .* as rank 0 of 2"):
        rank(rendezvous, 0, connections=connections, timeout_s=0.5).result(PATIENCE_S)
    assert time.monotonic() - began < SOON_S


def test_closing_the_rendezvous_of_a_weight_group_fails_pending_and_later_joins(rendezvous):
    before = rendezvous._store.num_keys()
    waiting = [rank(rendezvous, number, world_size=4) for number in (0, 1)]
    give_up = time.monotonic() + PATIENCE_S
    while rendezvous._store.num_keys() < before + 2:  # each of them writes its address
        assert time.monotonic() < give_up and not any(join.done() for join in waiting)
        time.sleep(0.01)
    rendezvous.close()
    for join in waiting:
        with pytest.raises(UpdateError, match="generation 1"):
            join.result(SOON_S)
    with pytest.raises(UpdateError, match=f"127.0.0.1:{rendezvous.port} as rank 2 of 4 failed: .*refused"):
        rank(rendezvous, 2, world_size=4).result(SOON_S)


@BOTH_WAYS
def test_receiving_rank_fails_without_waiting_if_the_sending_rank_leaves_the_weight_group(rendezvous, connections):
    root, leaf = ranks(rendezvous, connections=connections)
    got = torch.zeros(4, dtype=torch.uint8)
    receiving = in_background("receive", lambda: leaf.broadcast(got, deadline=time.monotonic() + PATIENCE_S))
    time.sleep(0.1)
    began = time.monotonic()
    root.close()
    with pytest.raises(UpdateError, match="a broadcast in group 'g' generation 1 failed"):
        receiving.result(PATIENCE_S)
    assert time.monotonic() - began < SOON_S


@BOTH_WAYS
def test_receiving_from_a_rank_that_sends_nothing_fails_at_the_deadline(rendezvous, connections):
    root, leaf = ranks(rendezvous, connections=connections)
    with pytest.raises(DeadlineError, match="timed out, not every rank took part"):
        leaf.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=time.monotonic() + 0.4)
    assert root is not None


def test_rendezvous_and_gloo_listen_only_on_loopback(rendezvous):
    """The test looks up the sockets of the rendezvous' store and of gloo in the kernel's table of sockets (Linux)."""
    pair = ranks(rendezvous)
    targets = [_target(link) for link in Path("/proc/self/fd").iterdir()]
    inodes = {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    assert listening == {"0100007F"}, "store and gloo must listen on 127.0.0.1"
    assert len(pair) == 2


def _target(link):
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_rank_whose_broadcast_failed_leaves_the_group_so_that_its_peers_fail_without_waiting(rendezvous):
    """If the failed rank stayed in the group, rank 0 would wait until its deadline."""
    root, leaf = ranks(rendezvous)
    with pytest.raises(DeadlineError):
        leaf.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=time.monotonic() + 0.2)
    with pytest.raises(UpdateError, match=r"this process (has )?left"):
        leaf.broadcast(torch.zeros(4, dtype=torch.uint8), deadline=time.monotonic() + PATIENCE_S)
    began = time.monotonic()
    with pytest.raises(UpdateError):
        root.broadcast(torch.zeros(2**25, dtype=torch.uint8), deadline=began + PATIENCE_S)
    assert time.monotonic() - began < SOON_S


def test_rank_that_waits_for_a_message_of_its_weight_group_prints_nothing(rendezvous, capfd):
    root, leaf = ranks(rendezvous)
    waiting = in_background("waiting", lambda: leaf.expect("digest", deadline=time.monotonic() + PATIENCE_S))
    time.sleep(0.3)
    root.announce("digest", "d0")
    assert waiting.result(PATIENCE_S) == "d0"
    with pytest.raises(DeadlineError, match="waiting for nothing in group 'g' generation 1"):
        leaf.expect("nothing", deadline=time.monotonic() + 0.15)
    assert capfd.readouterr().err == ""
