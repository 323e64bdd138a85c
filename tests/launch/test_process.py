"""Health checks, restart budgets and logs of single processes that the launcher starts."""

import socket
import sys
import threading
import time
from urllib.parse import quote

import pytest

from launch.plan import ProcessSpec
from launch.process import Process, RestartBudget
from pipelinerl.observability.progress import line
from pipelinerl.observability.status import FORGIVEN_EVERY_S, RestartStatus, RunStatus, read_restarts, write_restarts
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from tests.patience import wait_until


def healthy(port, password):
    spec = ProcessSpec(name="redis", argv=("x",), health=f"redis://127.0.0.1:{port}{quote(str(password))}")
    return Process(spec, password.parent).answers()


def test_stream_server_is_healthy_once_it_answers_ping_with_its_password(tmp_path):
    folder = tmp_path / "a run #1"
    with EmbeddedRedis(folder) as server:
        port = int(server.url.rpartition(":")[2])
        assert healthy(port, folder / "password")
        (tmp_path / "other").write_text("guess")
        assert not healthy(port, tmp_path / "other"), "a server with another password belongs to another run"
        assert not healthy(port, tmp_path / "absent"), "the server has no password file yet"
    assert not healthy(port, folder / "password")


@pytest.mark.parametrize(
    "reply", [b"", b"+OK\r\n", b"+OK\r\n-LOADING Redis is loading the dataset in memory\r\n", b"SSH-2.0\r\n"]
)
def test_stream_server_that_gives_no_valid_answer_is_not_healthy(tmp_path, reply):
    (tmp_path / "password").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connected, _ = listening.accept()
            with connected:
                connected.recv(100)
                connected.sendall(reply)

        answering = threading.Thread(target=answer)
        answering.start()
        assert not healthy(listening.getsockname()[1], tmp_path / "password")
        answering.join()


def test_processor_and_gpu_time_of_a_process_is_kept_over_its_deaths(tmp_path):
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    process = Process(ProcessSpec(name="busy", argv=(sys.executable, "-S", "-c", burn), gpus=0.5), tmp_path)
    used = [process.usage]
    for _ in range(2):
        process.start(began := time.monotonic())
        wait_until(lambda: process.exit_status() is not None, "the process has ended")
        process.finish()
        used.append(process.usage)
        assert used[-1].cpu_s - used[-2].cpu_s == pytest.approx(0.2, abs=0.1)
        assert used[-1].gpu_s - used[-2].gpu_s <= 0.5 * (time.monotonic() - began)
    assert 0 < used[1].gpu_s < used[2].gpu_s


@pytest.mark.parametrize(
    ("limit", "up_s", "waits"),
    [(3, 1.0, [0.5, 1.0, 2.0]), (3, FORGIVEN_EVERY_S / 2, [0.5] * 5), (0, 1e6, [])],
    ids=["crash loop", "faster than uptime earns restarts", "no restart allowed"],
)
def test_process_that_keeps_dying_restarts_after_growing_waits_until_its_budget_is_spent(limit, up_s, waits):
    budget, waited = RestartBudget(limit), []
    while not budget.is_spent_by(up_s):
        waited.append(budget.died(up_s))
    assert waited == waits and budget.deaths == len(waits)


@pytest.mark.parametrize("up_s", [FORGIVEN_EVERY_S, 600.0, 900.0])
def test_process_that_dies_only_after_long_uptimes_never_spends_its_restart_budget(up_s):
    """Deaths no longer count after enough uptime; otherwise the fourth death would end the run."""
    budget = RestartBudget(3)
    for _ in range(100):
        assert not budget.is_spent_by(up_s)
        assert budget.died(up_s) == 0.5
    assert budget.deaths == 100 and budget.unforgiven < 2.0


def test_restart_counts_are_shown_in_the_run_status(tmp_path):
    assert read_restarts(tmp_path) == ()
    write_restarts(tmp_path, (RestartStatus(name="trainer", deaths=5, unforgiven=1.0, limit=3),))
    (read,) = read_restarts(tmp_path)
    assert (read.name, read.deaths, read.limit) == ("trainer", 5, 3) and 0.9 < read.unforgiven <= 1.0
    assert "deaths: trainer 5 (1.0 of 3 unforgiven)" in line(RunStatus(run="x", restarts=(read,)))
    assert "deaths" not in line(RunStatus(run="x"))
    (tmp_path / "restarts.json").write_text("{")
    assert read_restarts(tmp_path) == ()
