"""`ray_cluster`: a real Ray cluster of two nodes on this machine, for one test; one of the nodes can be killed.

Ray leaves threads behind, so the cluster has a process of its own, which ends with the test.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import pytest

from tests.patience import PATIENCE_S

_MAIN = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    second = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    for word in sys.stdin:
        if word == "lose\\n":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(num_cpus=1)
        print("done", flush=True)
finally:
    cluster.shutdown()
"""


@dataclass(frozen=True)
class RayCluster:
    """A running cluster; `environment` has the variables that a process needs to connect to the cluster."""

    environment: dict[str, str]
    process: subprocess.Popen[str]

    def lose(self):
        self._do("lose")

    def replace(self):
        self._do("replace")

    def _do(self, word):
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def ray_cluster():
    """Yield a cluster for the block; if Ray is not installed, skip the test with that reason."""
    pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
    with TemporaryDirectory(prefix="ray-") as short:  # paths of Ray's sockets have at most 107 characters
        settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "HOME": short}
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster has not come up"
            yield RayCluster({**settings, "RAY_ADDRESS": address}, process)
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)
            process.stdout.close()
