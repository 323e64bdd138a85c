"""The launchers that start a run's nodes on other machines, chosen by `--on`.

To add a launcher, add a member of `Launcher`, a line in `rendered`, a line in `start_on`, and a file that starts
`pipelinerl node` on each host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launch.cluster import kubernetes, ray, slurm
from launch.cluster.membership import Members
from launch.placement import TRAINER
from launch.plan import Launch, ProcessSpec, processes_of, rank_of
from launch.run import prepare
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.roles.role import OnExit


class Launcher(StrEnum):
    """A system that can start a run's nodes on other machines."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """The target of a run: the launcher, the hosts, and options for the launcher."""

    by: Launcher
    members: Members
    slurm_options: Sequence[str] = ()
    image: str | None = None
    address: str | None = None


def rendered(config: RunConfig, where: ClusterTarget, run_dir: Path) -> str:
    """Return the script, manifests or resources that the launcher would get for a run in `run_dir`; start nothing."""
    if where.by is Launcher.SLURM:
        return slurm.slurm_script(config, where.members, run_dir=run_dir, extra=where.slurm_options)
    if where.by is Launcher.RAY:
        return ray.describe(config, where.members)
    if where.image is None:
        raise UserError("--on kubernetes needs a container image with this project; pass --image REGISTRY/NAME:TAG")
    objects = kubernetes.manifests(config, where.members, run_dir=run_dir, image=where.image)
    return kubernetes.manifest_text(objects, kubernetes.notes_for(config))


def start_on(
    config: RunConfig,
    where: ClusterTarget,
    *,
    claim: Callable[[RunConfig], bool],
    announce: Callable[[str], None] = print,
) -> int:
    """Start a run on the launcher; return 0 once the run is submitted. Raises `UserError` if that fails.

    Under Ray, wait for the end of the run and return the run's exit status. Under Kubernetes, the node of the first
    host makes the run's directory, on a volume of the cluster; under the other launchers, this function makes it.

    `claim` reserves the run's name (see `run_directory.create`).
    """
    if where.by is Launcher.KUBERNETES:
        run_dir = config.run_directory
        if not run_dir.is_absolute():
            raise UserError(
                f"run.directory must be absolute, the mount of the shared volume, got {config.run.directory}"
            )
        announce(kubernetes.apply(rendered(config, where, run_dir), Path.cwd(), config.run.name))
        return 0
    run_dir = prepare(config, claim=claim, members=where.members)
    announce(f"run {run_dir.name} in {run_dir}")
    if where.by is Launcher.RAY:
        return ray.run_on_ray(where.address, config, where.members, run_dir, announce)
    announce(slurm.submit(rendered(config, where, run_dir), run_dir))
    return 0


_ON_EXIT = {
    OnExit.RESTART: "",
    OnExit.DONE: "done with status 0",
    OnExit.COMPLETE: "status 0 completes the run",
    OnExit.SPARE: "the run continues without it",
}


def plan_lines(launch: Launch) -> Iterator[str]:
    """Yield lines on each host and its processes, on their shared environment variables, run directory and token."""
    plan = processes_of(launch)
    shared = {
        key: value for key, value in plan.specs[0].env.items() if all(spec.env.get(key) == value for spec in plan.specs)
    }
    name_width = max(len(spec.name) for spec in plan.specs)
    address_width = max(len(_address(spec)) for spec in plan.specs)
    for host in launch.placement.hosts:
        here = [spec for spec in plan.specs if spec.host == host.name]
        named = host.name if host.name == host.address else f"{host.name} ({host.address})"
        yield f"host {named}: {len(host.devices) or 'no'} GPU{'' if len(host.devices) == 1 else 's'}"
        for spec in here:
            meets = rank_of(spec.name) == 0 and TRAINER in launch.ports
            meeting = [f"its ranks meet at {launch.at(TRAINER)}"] if meets else []
            rules = "; ".join([_devices(launch, spec.name), *meeting, *_rules(spec)])
            yield f"  {spec.name:<{name_width}}  {_address(spec):<{address_width}}  {rules}"
            own = " ".join(f"{key}={value}" for key, value in spec.env.items() if key not in shared)
            if own:
                yield f"  {'':<{name_width}}  {own}"
        if not here:
            yield "  nothing"
    yield "environment of all: " + " ".join(f"{key}={value}" for key, value in shared.items())
    yield f"run directory: {launch.run_dir}"
    yield f"bearer token: in {launch.token_file}, which its owner alone may read"


def plan_json(launch: Launch) -> dict[str, Any]:
    """Return the whole plan as JSON values for other programs, including every process's arguments."""
    processes = [
        {
            "name": spec.name,
            "host": spec.host,
            "rank": rank_of(spec.name),
            "argv": list(spec.argv),
            "env": dict(spec.env),
            "health": spec.health,
            "devices": list((on := launch.assignment_of(spec.name)).indices),
            "memory_share": on.share,
            "cores": None if spec.cpu is None else list(spec.cpu),
            "after": list(spec.after),
            "on_exit": str(spec.on_exit),
            "restarts": spec.restarts,
            "stop_order": spec.stop_order,
            "group": spec.group,
        }
        for spec in processes_of(launch).specs
    ]
    return {
        "run_dir": str(launch.run_dir),
        "token_file": str(launch.token_file),
        "hosts": [host.to_json() for host in launch.placement.hosts],
        "processes": processes,
    }


def _address(spec: ProcessSpec) -> str:
    if spec.health is None:
        return ""
    parts = urlsplit(spec.health)
    return f"{parts.scheme}://{parts.netloc}"


def _devices(launch: Launch, name: str) -> str:
    on = launch.assignment_of(name)
    if not on.indices:
        return "CPU"
    labels = map(launch.placement.host_of(name).devices.label, on.indices)
    return " + ".join(labels) + ("" if on.share is None else f" ({on.share:g} of it)")


def _rules(spec: ProcessSpec) -> Iterator[str]:
    if spec.after:
        yield f"after {', '.join(spec.after)}"
    yield f"{spec.restarts} restart{'' if spec.restarts == 1 else 's'}"
    if spec.group is not None:
        yield f"restarted with group {spec.group}"
    if _ON_EXIT[spec.on_exit]:
        yield _ON_EXIT[spec.on_exit]
