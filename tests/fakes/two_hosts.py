"""`two_hosts`: two simulated machines on this one, each with its own network and loopback, connected by a cable.

They are Linux network namespaces within a user namespace, which needs no privilege if the kernel allows it. A server on
the loopback of one host is unreachable from the other.
"""

import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Host:
    """One of the two hosts: its address, and the command prefix that runs a command there."""

    address: str
    enter: tuple[str, ...]

    def run(self, *words):
        done = subprocess.run([*self.enter, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def two_hosts():
    """Yield both hosts for the block; skip the test if this machine forbids the namespaces."""
    missing = [program for program in ("unshare", "nsenter", "ip") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"two hosts need {', '.join(missing)} (util-linux, iproute2)")
    with ExitStack() as stack:
        one = Host("10.77.0.1", _namespace(stack, ["unshare", "--user", "--map-root-user", "--net"]))
        two = Host("10.77.0.2", _namespace(stack, [*one.enter, "unshare", "--net"]))
        one.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", two.enter[2])
        for host in (one, two):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
            host.run("ip", "link", "set", "lo", "up")
        yield one, two


def _namespace(stack, make):
    """Start a namespace with `make` that ends when `stack` closes; return the command prefix that enters it."""
    process = stack.enter_context(subprocess.Popen([*make, "sleep", "3600"], stderr=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
        if process.poll() is not None:
            assert process.stderr is not None
            pytest.skip(f"this machine lets nobody make network namespaces: {process.stderr.read().strip()}")
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ("nsenter", "--target", str(process.pid), "--user", "--net", "--preserve-credentials")
