"""Runs on Ray: the requested resources, and a real cluster of two Ray nodes that runs `pipelinerl node` on each."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from launch.cluster import ray as launcher
from launch.cluster.membership import Members
from launch.hosts import numbered_devices, read_hosts
from pipelinerl.errors import UserError
from tests.fakes.live_run import CLI, endless_run, launched
from tests.fakes.ray_cluster import ray_cluster
from tests.launch.config import config_of
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CONFIG = config_of(run={"name": "x"})

#: A program that runs a cluster of two Ray nodes; it is a separate process, because Ray leaves threads behind. The run
#: is already over, so that `pipelinerl node` ends immediately and only the use of Ray is tested.
_CLUSTER = """
import os, sys
from pathlib import Path
from ray.cluster_utils import Cluster
from launch.cluster import ray
from launch.cluster.membership import LaunchRecord, Members, write_launch
from launch.hosts import read_hosts
from launch.supervisor import RunOutcome, RunResult
from pipelinerl.config.recipe import parse
from pipelinerl.errors import UserError

run_dir = Path(sys.argv[1])
sections = {"engine": {"type": "bigram"}, "trainer": {"type": "bigram"}}
config = parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], **sections})
two, three = (Members(hosts=read_hosts(config, [], count=count, gpus=0)) for count in (2, 3))
write_launch(run_dir, LaunchRecord(id="1", members=two, result=RunResult(RunOutcome.COMPLETED, "completed")))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    print("status", ray.run_on_ray(None, config, two, run_dir, print))
    ray.PLACED_S = 1.0
    try:
        ray.run_on_ray(None, config, three, run_dir, print)
    except UserError as error:
        print("refused:", error)
finally:
    cluster.shutdown()
"""


def test_resources_requested_from_ray_are_those_of_each_host():
    members = Members(hosts=read_hosts(CONFIG, ["a:gpus=8", "b:gpus=0"], count=None, gpus=None))
    assert launcher.bundles_of(members) == [{"CPU": 1.0, "GPU": 8.0}, {"CPU": 1.0}]
    assert launcher.describe(CONFIG, members).splitlines() == [
        "placement group x, strategy STRICT_SPREAD:",
        "  a: CPU 1, GPU 8; pipelinerl node RUN --name a, up to 3 restarts",
        "  b: CPU 1; pipelinerl node RUN --name b, up to 3 restarts",
    ]


def test_host_is_unchanged_after_conversion_to_a_command_line_argument_and_back():
    (host,) = read_hosts(CONFIG, ["a=10.0.0.1:gpus=2,roles=engine"], count=None, gpus=None)
    assert read_hosts(CONFIG, [host.word], count=None, gpus=None) == (host,)
    assert host.devices == numbered_devices(2)


def test_run_on_ray_is_rejected_with_an_install_command_if_ray_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    members = Members(hosts=read_hosts(CONFIG, ["a:gpus=0"], count=None, gpus=None))
    with pytest.raises(UserError, match=r"pip install -e '\.\[ray\]'"):
        launcher.run_on_ray(None, CONFIG, members, tmp_path, print)


@pytest.mark.slow
def test_run_on_a_cluster_of_two_ray_nodes_executes_pipelinerl_node_on_each_of_them(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with TemporaryDirectory(prefix="ray-") as short:  # short, since a socket's path has at most 107 characters
        done = subprocess.run(
            [sys.executable, "-c", _CLUSTER, str(run_dir)],
            env={**environment, "RAY_TMPDIR": short, "HOME": short},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "status 0\n" in done.stdout
    outputs = [run_dir / "cluster" / f"node-host-{number}.out" for number in range(2)]
    assert [path.read_text() for path in outputs] == ["the run is over: completed\n"] * 2
    assert "refused: Ray has no room for 3 hosts" in done.stdout
    assert "its machines have: CPU 1, GPU 0; CPU 1, GPU 0; add machines" in done.stdout


def _served(run):
    return len(run.events("engine_verified"))


@pytest.mark.slow
def test_run_continues_after_a_lost_machine_of_the_ray_cluster_was_replaced(tmp_path):
    """Ray decides which host of the run is on the lost machine; if the head is, the run resumes from a checkpoint."""
    directory = tmp_path / "run"
    words = [*endless_run(directory, "engine.count=2"), "--on", "ray", "--nodes", "2", "--first-port", "23000"]
    with ray_cluster() as cluster, launched(words, directory, environment=cluster.environment) as run:
        run.until(lambda run: _served(run) == 2, "an engine on both machines")
        run.until_step(3)
        cluster.lose()
        run.until(lambda run: "died; restarting it" in run.output, "the loss to be noticed")
        cluster.replace()
        verified = _served(run)
        run.until(lambda run: _served(run) > verified, "an engine on the other machine")
        run.until_step(max(run.steps()) + 3)
        subprocess.run([*CLI, "stop", str(directory)], check=True, timeout=PATIENCE_S)
        assert run.end() == 0, run.story()
    ledger = run.events("run_finished")[-1]["ledger"]
    assert ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")
    assert ledger["trained"] == 8 * max(run.steps()) and not ledger["failed"]
