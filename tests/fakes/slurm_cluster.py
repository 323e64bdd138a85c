"""`slurm_cluster`: a real Slurm of two nodes on this machine, n1 at 127.0.0.1 and n2 at 127.0.0.2, for one test.

Debian's slurmctld, slurmd and munged write to a folder of the test and use free ports. They run in the foreground as
children of the test, and are killed when it ends.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelinerl.system.machine import free_ports
from pipelinerl.system.supervised_process import tied
from tests.patience import PATIENCE_S

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster; `environment` has the variables that Slurm's client commands need."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words):
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def state(self, job):
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def logs(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@contextmanager
def slurm_cluster(folder):
    """Yield a running cluster, which ends with the block; skip the test if this machine cannot run Slurm."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: a real Slurm needs Debian's slurmctld, slurmd, munge")
    if os.geteuid() != 0:
        pytest.skip("a real Slurm on this machine needs root, as whom slurmd starts tasks")
    folder.mkdir(mode=0o755)
    conf, key = folder / "slurm.conf", folder / "munge.key"
    conf.write_text(_CONF.format(folder=folder, host=socket.gethostname(), ports=free_ports(3)))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    made = SlurmCluster(folder, {**os.environ, "SLURM_CONF": str(conf)})
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
    with ExitStack() as stack:
        _daemon(stack, made, munged)
        _until(made, (folder / "munge.socket").exists, "munged's socket")
        _daemon(stack, made, ["slurmctld", "-D", "-i", "-f", str(conf)])
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            _daemon(stack, made, ["slurmd", "-D", "-N", node, "-f", str(conf)])
        _until(made, lambda: _idle(made) == 2, "two idle nodes")
        try:
            yield made
        finally:
            subprocess.run(["scancel", "--user=root"], env=made.environment, timeout=PATIENCE_S, check=False)
            _until(made, lambda: _jobs(made) == "", "the end of all jobs")


def _idle(cluster):
    words = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(
        words, env=cluster.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.stdout.split().count("idle")


def _jobs(cluster):
    words = ["squeue", "--noheader"]
    done = subprocess.run(
        words, env=cluster.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.stdout.strip()


def _daemon(stack, cluster, words):
    with (cluster.folder / f"{words[0]}-{len(list(cluster.folder.glob('*.out')))}.out").open("wb") as out:
        process = subprocess.Popen(tied(words), env=cluster.environment, stdout=out, stderr=out)
    stack.callback(process.wait, PATIENCE_S)
    stack.callback(process.kill)


def _until(cluster, reached, what):
    assert callable(reached)
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, f"{what} did not come:\n{cluster.logs()}"
        time.sleep(0.05)
