"""A run on a Ray cluster: a placement group has a bundle of resources per host, in which a Ray actor runs its node.

Ray finds machines, reserves their GPUs, and replaces a lost machine. On each machine it only starts `pipelinerl node`
as a separate process: no role imports ray, and no data of the run passes through the object store.

| the launcher waits for                | how long          | then                                                   |
|---------------------------------------|-------------------|--------------------------------------------------------|
| a placement group                     | `PLACED_S`        | raises an error that lists what each host needs        |
| the head's node                       | –                 | ends with the exit status of the head's node           |
| the replacement of a node that died   | –                 | meanwhile the run continues without this host          |
| a replacement on a different machine  | –                 | restarts all nodes: the run resumes from a checkpoint  |
| the other nodes, after the head's end | 10 s              | kills them                                             |
| the run to be saved, after Ctrl-C     | `save_s` + 10 s   | kills the run                                          |

A node may die `launch.restarts` times. Ray notices a lost machine only after some seconds. Until then it places actors
on the lost machine, where they never run; the launcher requests new actors until one answers.

Requirements: all machines see the run's directory and the model on a shared file system, and have this project
installed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launch.cluster.membership import Members
from launch.hosts import Host
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.system.supervised_process import tied

PLACED_S: Final = 120.0
_ASK_S: Final = 60.0
_LOOK_S: Final = 1.0
#: Seconds before a new actor is requested in place of an actor that never ran.
_AGAIN_S: Final = 2.0
#: Seconds that the other nodes have to end after the head's, and the run, after saving, to stop its processes.
_STOP_S: Final = 10.0


def bundles_of(members: Members) -> list[dict[str, float]]:
    """Return the resources that the run reserves from Ray for each host."""
    gpus = [len(host.devices) for host in members.hosts]
    return [{"CPU": 1.0, **({"GPU": float(count)} if count else {})} for count in gpus]


def describe(config: RunConfig, members: Members) -> str:
    """Describe the resources that the run would request from Ray; start nothing."""
    lines = [f"placement group {config.run.name}, strategy STRICT_SPREAD:"]
    for host, bundle in zip(members.hosts, bundles_of(members), strict=True):
        takes = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        lines.append(
            f"  {host.name}: {takes}; pipelinerl node RUN --name {host.name}, up to {config.launch.restarts} restarts"
        )
    return "\n".join(lines)


class NodeProcess:
    """The Ray actor in a bundle: runs the node as a separate process that ends with the actor."""

    def address(self) -> str:
        return str(_ray().util.get_node_ip_address())

    def serve(self, words: Sequence[str], output: str) -> int:
        """Run `pipelinerl node` with the arguments `words` and output to the file `output`; return its exit status."""
        command = tied([sys.executable, "-P", "-m", "pipelinerl.cli", "node", *words], "SIGTERM")
        with open(output, "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return process.wait()


def run_on_ray(
    address: str | None, config: RunConfig, members: Members, run_dir: Path, announce: Callable[[str], None]
) -> int:
    """Run the nodes on the Ray cluster at `address`; return the exit status of the head's node.

    If `address` is None, use the cluster to which this machine belongs.

    Raises:
        UserError: ray is not installed, no cluster answers, or the cluster cannot hold the hosts.
    """
    ray = _ray()
    try:
        ray.init(address=address or "auto", log_to_driver=False, namespace="pipelinerl")
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}; start one with `ray start --head`, and "
            "pass --on ray://HOST:10001 from another machine"
        ) from None
    try:
        return _Nodes(ray, config, members, run_dir, announce).run()
    finally:
        ray.shutdown()


class _Nodes:
    """The nodes of one run on one cluster."""

    def __init__(
        self, ray: Any, config: RunConfig, members: Members, run_dir: Path, announce: Callable[[str], None]
    ) -> None:
        self._ray = ray
        self._config = config
        self._members = members
        self._run_dir = run_dir
        self._announce = announce
        self._group = self._place_group()
        self._left = dict.fromkeys((host.name for host in members.hosts), config.launch.restarts)
        self._actors: dict[str, Any] = {}
        self._hosts: dict[str, Host] = {}
        self._locating: dict[Any, str] = {}
        self._serving: dict[Any, str] = {}
        self._due: dict[str, float] = {}
        self._interrupts = 0
        self._kill_at = float("inf")

    def run(self) -> int:
        """Start all nodes, and restart those that die; return the exit status of the head's node."""

        def note(_number: int, _frame: object) -> None:
            self._interrupts += 1

        before = [(each, signal.signal(each, note)) for each in (signal.SIGINT, signal.SIGTERM)]
        try:
            self._begin_all()
            while True:
                for reference in self._ready():
                    if reference in self._locating:
                        self._located(self._locating.pop(reference), reference)
                    elif reference in self._serving:  # ignore nodes from before a restart of all nodes
                        status = self._ended(self._serving.pop(reference), reference)
                        if status is not None:
                            if self._serving:  # their processes have stopped already; wait for their last output
                                self._ray.wait(list(self._serving), num_returns=len(self._serving), timeout=_STOP_S)
                            return status
                for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
                    del self._due[name]
                    self._begin(name)
                if self._interrupts and self._kill_at == float("inf"):
                    self._suspend()
                if self._interrupts > 1 or time.monotonic() > self._kill_at:
                    self._announce("the state could not be saved; killing the run")
                    return 130
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            self._ray.util.remove_placement_group(self._group)

    def _place_group(self) -> Any:
        bundles = bundles_of(self._members)
        group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name=self._config.run.name)
        if group.wait(timeout_seconds=PLACED_S):
            return group
        self._ray.util.remove_placement_group(group)
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        there = "; ".join(f"CPU {each.get('CPU', 0):g}, GPU {each.get('GPU', 0):g}" for each in alive)
        raise UserError(
            f"Ray has no room for {len(bundles)} hosts, each on a machine of its own, within {PLACED_S:g} s:\n"
            f"{describe(self._config, self._members)}\nits machines have: {there}; add machines, or lower "
            "--nodes or --gpus"
        )

    def _ready(self) -> list[Any]:
        awaited = [*self._locating, *self._serving]
        if not awaited:  # Ray rejects an empty list of references
            time.sleep(_LOOK_S)
            return []
        done, _ = self._ray.wait(awaited, num_returns=1, timeout=_LOOK_S)
        return list(done)

    def _begin_all(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors, self._hosts, self._locating, self._serving, self._due = {}, {}, {}, {}, {}
        for host in self._members.hosts:
            self._begin(host.name)

    def _begin(self, name: str) -> None:
        """Request an actor on the host's machine; its node starts once the actor has reported its address."""
        takes = bundles_of(self._members)[self._number(name)]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._number(name))
        remote = self._ray.remote(NodeProcess)
        actor = remote.options(num_cpus=takes["CPU"], num_gpus=takes.get("GPU", 0), scheduling_strategy=where).remote()
        self._actors[name] = actor
        self._locating[actor.address.remote()] = name

    def _located(self, name: str, reference: Any) -> None:
        """Record the address that a host's actor reported; start the nodes once all addresses are known.

        An actor that failed because its machine is lost is requested again. A changed address restarts all nodes.
        """
        try:
            address = str(self._ray.get(reference, timeout=_ASK_S))
        except self._ray.exceptions.RayActorError:
            self._due[name] = time.monotonic() + _AGAIN_S
            return
        before = self._hosts.get(name)
        if before is not None and before.address != address:
            self._announce(f"{name} moved to another machine; restarting all nodes from the checkpoint")
            self._begin_all()
            return
        self._hosts[name] = replace(self._members.hosts[self._number(name)], address=address)
        if len(self._hosts) == len(self._members.hosts):  # a node starts only once the addresses of all hosts are known
            located = [self._hosts[host.name] for host in self._members.hosts]
            hosts = [word for host in located for word in ("--node", host.word)]
            for each in set(self._actors) - {*self._serving.values(), *self._locating.values(), *self._due}:
                words = [str(self._run_dir), "--name", each, "--first-port", str(self._members.first_port), *hosts]
                output = self._run_dir / "cluster" / f"node-{each}.out"
                self._announce(f"{each} is {self._hosts[each].address}; its output goes to {output}")
                self._serving[self._actors[each].serve.remote(words, str(output))] = each

    def _number(self, name: str) -> int:
        return [host.name for host in self._members.hosts].index(name)

    def _ended(self, name: str, reference: Any) -> int | None:
        """Handle the end of a node; restart a node that died. Return the exit status of the run once it has ended."""
        head = self._members.hosts[0].name
        try:
            status = int(self._ray.get(reference, timeout=_ASK_S))
        except self._ray.exceptions.RayActorError:
            status = 128 + signal.SIGKILL
        status = 128 - status if status < 0 else status
        if status <= 2 or status == 130:
            del self._actors[name]
            if status and name != head:
                self._announce(f"{name} ended with status {status}; see its output in {self._run_dir / 'cluster'}")
            return status if name == head else None
        self._left[name] -= 1
        if self._left[name] < 0:
            self._announce(f"{name} died too often; its output is in {self._run_dir / 'cluster'}")
            return 1
        self._announce(f"{name} died; restarting it")
        self._ray.kill(self._actors[name])
        self._begin(name)
        return None

    def _suspend(self) -> None:
        # No need to stop nodes here: the head's node ends once the run's state is saved, which ends the loop in `run`.
        self._announce("saving; press Ctrl-C again to kill at once")
        self._kill_at = time.monotonic() + self._config.launch.save_s + _STOP_S
        words = [sys.executable, "-P", "-m", "pipelinerl.cli", "stop", str(self._run_dir), "--suspend"]
        try:
            subprocess.run(words, timeout=_ASK_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self._kill_at = 0.0


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--on ray needs Ray: pip install -e '.[ray]', on every machine of the cluster") from None
    return ray
