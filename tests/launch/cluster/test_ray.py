"""Ray: what it is asked for, and a real cluster of two nodes that runs the nodes of a run until that completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cluster import ray as launcher
from launch.cluster.membership import Members
from launch.hosts import numbered_devices, read_hosts
from pipelinerl.config.recipe import parse
from pipelinerl.errors import UserError
from pipelinerl.observability.events import read_events
from tests.fakes.live_run import CLI, light_run
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CONFIG = parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], "run": {"name": "x"}})

#: A cluster of two nodes, which runs the words after it; in a process of its own, since Ray leaves threads behind.
_CLUSTER = """
import subprocess, sys, os
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
try:
    status = subprocess.run(sys.argv[1:], env={**os.environ, "RAY_ADDRESS": cluster.address}, timeout=480).returncode
finally:
    cluster.shutdown()
sys.exit(status)
"""


def test_a_bundle_holds_what_its_host_takes() -> None:
    members = Members(hosts=read_hosts(CONFIG, ["a:gpus=8", "b:gpus=0"], count=None, gpus=None))
    assert launcher.bundles_of(members) == [{"CPU": 1.0, "GPU": 8.0}, {"CPU": 1.0}]
    assert launcher.describe(CONFIG, members).splitlines() == [
        "placement group x, strategy STRICT_SPREAD:",
        "  a: CPU 1, GPU 8; pipelinerl node RUN --name a, up to 3 restarts",
        "  b: CPU 1; pipelinerl node RUN --name b, up to 3 restarts",
    ]


def test_the_words_of_a_host_say_the_same_of_it() -> None:
    (host,) = read_hosts(CONFIG, ["a=10.0.0.1:gpus=2,roles=engine"], count=None, gpus=None)
    assert read_hosts(CONFIG, [host.word], count=None, gpus=None) == (host,)
    assert host.devices == numbered_devices(2)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    members = Members(hosts=read_hosts(CONFIG, ["a:gpus=0"], count=None, gpus=None))
    with pytest.raises(UserError, match=r"pip install 'pipelinerl\[ray\]'"):
        launcher.run_on_ray(None, CONFIG, members, tmp_path, print)


@pytest.mark.slow
def test_a_run_on_a_real_cluster_of_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
    directory = tmp_path / "run"
    words = [*CLI, "run", *light_run(directory, "run.steps=4", "engine.count=2"), "--on", "ray", "--hosts", "2"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    environment |= {"RAY_TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _CLUSTER, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    nodes = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in (directory / "cluster").glob("*.out"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{nodes}"
    kinds = [event["kind"] for event in read_events(directory / "events.jsonl")]
    assert kinds.count("engine_verified") >= 2 and "run_finished" in kinds
    assert (directory / "cluster" / "node-host-1.json").is_file()
