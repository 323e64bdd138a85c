"""Tests that rank 0 runs commands on the other ranks, and tells them at the end whether it finished or failed."""

import socket
import threading
from contextlib import closing

import pytest

from pipelinerl.trainers.ranks.commands import Channel, Discard, Lane, Numbered, RankAnswer, RanksEnd, decode, encode
from pipelinerl.trainers.ranks.rank0 import Ranks, one_ahead
from tests.patience import PATIENCE_S
from trainer_contract.errors import RankError


def two_ranks():
    """Return the `Ranks` of rank 0, and rank 1's end of the connection; losing a rank does not end the test process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        other = Channel(server.accept()[0], peer="rank 0", silence_s=PATIENCE_S)
    channel = Channel(connection, peer="rank 1", silence_s=PATIENCE_S)
    return Ranks({1: channel}, timeout_s=PATIENCE_S, end_process=lambda error: None), other


@pytest.mark.parametrize("reason", ["", "rank 0 met an error"])
def test_rank_0_sends_the_other_ranks_one_end_message_with_its_failure_reason_if_any(reason):
    ranks, other = two_ranks()
    if reason:
        ranks.leave(reason)
    ranks.end()
    ranks.end()  # a second call does nothing
    assert decode(other.receive()) == RanksEnd(reason=reason)
    other.close()


def test_rank_0_sends_the_next_command_before_the_previous_one_ends():
    ranks, other = two_ranks()
    may_end = threading.Event()
    first = ranks.begin(lambda _: Discard(1), lambda: may_end.wait(PATIENCE_S), lane=Lane.READS)
    second = ranks.begin(lambda _: Discard(2), may_end.is_set, lane=Lane.READS)
    received = [decode(other.receive()) for _ in range(2)]
    assert received == [Numbered(1, Lane.READS, Discard(1)), Numbered(2, Lane.READS, Discard(2))]
    for number in (2, 1):
        other.send(encode(RankAnswer(number, [])))
    may_end.set()
    assert first().own and second().own, "rank 0's parts come in the order in which they were begun"
    ranks.end()
    other.close()


def test_commands_after_the_loss_of_a_rank_raise_a_rank_error():
    ranks, other = two_ranks()
    first = ranks.begin(lambda _: Discard(1), lambda: None, lane=Lane.READS)
    other.close()
    with pytest.raises(RankError, match="rank 1 is gone"):
        first()
    with pytest.raises(RankError, match="rank 1 is gone"):
        ranks.begin(lambda _: Discard(1), lambda: None, lane=Lane.READS)


def test_closing_the_result_iterator_early_waits_for_commands_in_progress():
    log = []

    def begun():
        for number in range(4):
            log.append(f"begin {number}")
            yield lambda number=number: log.append(f"end {number}") or number

    assert list(one_ahead(begun())) == [0, 1, 2, 3]
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3", "end 2", "end 3"]
    log.clear()
    with closing(one_ahead(begun())) as ahead:
        assert next(ahead) == 0
    assert log == ["begin 0", "begin 1", "end 0", "end 1"]
