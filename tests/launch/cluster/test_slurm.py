"""Runs on Slurm: the text of the batch script, and a real cluster of two nodes that runs the script."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from launch.cluster import slurm
from launch.cluster.membership import Members
from launch.hosts import read_hosts
from pipelinerl.errors import UserError
from pipelinerl.system.machine import free_ports
from tests.fakes.live_run import CLI, endless_run
from tests.fakes.slurm_cluster import slurm_cluster
from tests.launch.config import config_of, events_of
from tests.patience import PATIENCE_S

GOLDEN = Path(__file__).parents[1] / "golden" / "hosts"
RUN = Path("/runs/a run")


def _script(words, *, count=None, gpus=8, **rest):
    config = config_of(launch={"save_s": 45.0})
    members = Members(hosts=read_hosts(config, words, count=count, gpus=gpus))
    return slurm.slurm_script(config, members, run_dir=RUN, **rest)


def test_slurm_script_requests_resources_and_a_signal_before_the_time_limit():
    script = _script((), count=2, extra=("--partition=gpu", "--time=4:00:00"))
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--gpus-per-node=8", "--requeue", "--no-kill", "--signal=B:TERM@105"} <= set(directives)
    assert directives[-2:] == ["--partition=gpu", "--time=4:00:00"], "options of the user come last and take precedence"
    assert not any(directive.startswith("--nodelist") for directive in directives)
    assert "run='/runs/a run'\n" in script
    assert '--node "$name=${address:-$name}:gpus=8"' in script


def test_hosts_named_in_a_slurm_script_keep_their_order_and_options():
    script = _script(("t7:gpus=4,roles=trainer", "e1:gpus=8,roles=engine+actor"))
    assert "#SBATCH --nodelist=t7,e1" in script and "#SBATCH --gpus-per-node=8" in script
    assert "names=(t7 e1)\ndeclare -A more=([t7]=:gpus=4,roles=trainer [e1]=:gpus=8,roles=actor+engine)" in script


def test_slurm_hosts_with_different_gpu_counts_are_rejected_if_they_are_not_named():
    with pytest.raises(UserError, match="need Slurm's names"):
        _script(("host-0:gpus=1", "host-1:gpus=2"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is bash's")
def test_slurm_script_is_valid_bash():
    for script in (_script((), count=3), _script(("a", "b"))):
        done = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_slurm_script_is_kept_and_the_error_names_its_path_if_sbatch_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rf"sbatch is not on PATH.*sbatch {tmp_path}/slurm\.sh"):
        slurm.submit("#!/bin/bash\n", tmp_path)
    assert (tmp_path / "slurm.sh").is_file()


# --- a real cluster: the script with a fake of `pipelinerl`, then whole runs ------------------------------------------

#: A fake of the program `pipelinerl` for the script: its command `node` runs until its command `stop` is called.
_PROGRAM = """
import os, sys, time
from pathlib import Path
command, run = sys.argv[1], Path(sys.argv[2])
if command == "stop":
    (run / "stop").write_text(" ".join(sys.argv[3:]))
    sys.exit()
name, life = sys.argv[4], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
with open(run / f"{name}-{life}", "a") as file:
    file.write(f"{os.getpid()} {' '.join(sys.argv[5:])}\\n")
while not (run / ("over" if life else "stop")).exists():
    time.sleep(0.05)
"""


def _lives(run_dir, name, life):
    path = run_dir / f"{name}-{life}"
    return path.read_text().splitlines() if path.exists() else []


#: The time at which a requeued job may start, in Slurm's syntax. By default, Slurm would wait for two minutes. An
#: immediate start would fail: in the second in which a node ended the job's previous run, the node rejects the job's
#: credential ("Job credential revoked"), and the job is lost.
_SOON = "now+5"


@pytest.mark.slow
def test_slurm_script_restarts_killed_srun_steps_and_suspends_the_run_before_the_time_limit(tmp_path):
    """Slurm's signal before the time limit suspends the run, and the requeued job starts the run's nodes again."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "program.py").write_text(_PROGRAM)
    config = config_of(engine={"type": "bigram"}, trainer={"type": "bigram"})
    members = Members(hosts=read_hosts(config, [], count=2, gpus=None), first_port=21000)
    program = shlex.join([sys.executable, "-S", "-E", str(tmp_path / "program.py")])
    script = slurm.slurm_script(config, members, run_dir=run_dir)
    script, replaced = re.subn(r"(?m)^pipelinerl=\(.*\)$", f"pipelinerl=({program})", script)
    assert replaced == 1
    (run_dir / "slurm.sh").write_text(script)
    with slurm_cluster(tmp_path / "slurm") as cluster:
        job = cluster.run("sbatch", "--parsable", str(run_dir / "slurm.sh")).strip()
        served = partial(_lives, run_dir)
        _until(cluster, run_dir, lambda: served("n1", 0) and served("n2", 0), "a node on both hosts")
        hosts = "--first-port 21000 --node n1=127.0.0.1:gpus=0 --node n2=127.0.0.2:gpus=0"
        first = served("n2", 0)[0]
        assert first.split(" ", 1)[1] == hosts and served("n1", 0)[0].split(" ", 1)[1] == hosts
        os.kill(int(first.split()[0]), signal.SIGKILL)
        _until(cluster, run_dir, lambda: len(served("n2", 0)) == 2, "the node that was killed again")
        assert len(served("n1", 0)) == 1, "the step of the other host continued"
        cluster.run("scancel", "--batch", "--signal=TERM", job)  # the signal that Slurm sends before the time limit
        _until(cluster, run_dir, (run_dir / "stop").exists, "the notice")
        assert (run_dir / "stop").read_text() == "--suspend"
        _until(cluster, run_dir, lambda: cluster.state(job) == "PENDING", "the job in the queue again")
        cluster.run("scontrol", "update", f"JobId={job}", f"StartTime={_SOON}")
        _until(cluster, run_dir, lambda: served("n1", 1) and served("n2", 1), "the next life")
        (run_dir / "over").touch()
        _until(cluster, run_dir, lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "the job's end")
        assert cluster.state(job) == "COMPLETED", (run_dir / f"slurm-{job}.out").read_text()


def _submitted(cluster, arguments):
    (port,) = free_ports(1)  # tests that run at the same time share this machine's addresses
    hosts = ("--nodes", "2", "--first-port", str(port))
    output = cluster.run(*CLI, "run", *arguments, "--on", "slurm", *hosts)
    return output.partition("submitted as job ")[2].partition(";")[0]


def _until(cluster, directory, reached, what):
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            outputs = "\n".join(path.read_text() for path in directory.glob("slurm-*.out"))
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in directory.glob("logs/*.log"))
            raise AssertionError(f"{what} did not come:\n{cluster.logs()}\n{outputs}\n{logs}")
        time.sleep(0.1)


@pytest.mark.slow
def test_run_suspended_at_the_slurm_time_limit_resumes_in_the_requeued_job(tmp_path):
    directory = tmp_path / "run"

    def made():
        return [event["step"] for event in events_of(directory, "step")]

    with slurm_cluster(tmp_path / "slurm") as cluster:
        job = _submitted(cluster, endless_run(directory, "engine.count=2"))
        _until(cluster, directory, lambda: len(events_of(directory, "engine_verified")) >= 2, "both engines")
        hosts = {event["url"].split(":")[1] for event in events_of(directory, "engine_verified")}
        assert hosts == {"//127.0.0.1", "//127.0.0.2"}
        _until(cluster, directory, lambda: len(made()) >= 3, "three steps")
        cluster.run("scancel", "--batch", "--signal=TERM", job)
        _until(cluster, directory, lambda: cluster.state(job) == "PENDING", "the job in the queue again")
        reached = max(made())
        assert len(events_of(directory, "run_suspended")) == 1
        cluster.run("scontrol", "update", f"JobId={job}", f"StartTime={_SOON}")
        _until(cluster, directory, lambda: max(made()) >= reached + 3, "three steps more")
        cluster.run(*CLI, "stop", str(directory))
        _until(cluster, directory, lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "the job's end")
        assert cluster.state(job) == "COMPLETED", (directory / f"slurm-{job}.out").read_text()
    assert made() == list(range(1, max(made()) + 1)), "each step is trained once"
    orders = [order for event in events_of(directory, "step") for order in event["orders"]]
    assert len(orders) == len(set(orders)) == events_of(directory, "run_finished")[-1]["ledger"]["trained"]
