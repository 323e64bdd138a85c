"""How rank 0 sends the others home: as done, or as those who are to be begun again."""

from __future__ import annotations

import socket

import pytest

from pipelinerl.trainers.ranks.channel import Channel
from pipelinerl.trainers.ranks.commands import RanksEnd, decode
from pipelinerl.trainers.ranks.rank0 import Ranks
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("reason", ["", "rank 0 met an error"])
def test_they_hear_whether_the_work_is_done(reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        other = Channel(server.accept()[0], peer="rank 0", silence_s=PATIENCE_S)
    ranks = Ranks({1: Channel(connection, peer="rank 1", silence_s=PATIENCE_S)}, timeout_s=PATIENCE_S)
    if reason:
        ranks.leave(reason)
    ranks.end()
    ranks.end()  # once is enough
    assert decode(other.receive()) == RanksEnd(reason=reason)
    other.close()
