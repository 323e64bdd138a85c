"""The launchers that start a run's nodes on other machines, chosen by `--on`.

To add a launcher, add a member of `Launcher`, a line in `rendered`, a line in `start_on`, and a file that starts
`pipelinerl node` on each host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launch.cluster import kubernetes, ray, slurm
from launch.cluster.membership import Members
from launch.run import prepare
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError


class Launcher(StrEnum):
    """A system that starts nodes."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTarget:
    """The target of a run: the launcher, the hosts, and options for the launcher."""

    by: Launcher
    members: Members
    slurm_options: Sequence[str] = ()
    image: str | None = None
    address: str | None = None


def read_launcher(word: str) -> tuple[Launcher, str | None]:
    """Parse `--on` into a launcher and its address, if it has one: `ray://host:10001`.

    Raises:
        UserError: there is no such launcher.
    """
    if word.startswith("ray://"):
        return Launcher.RAY, word
    try:
        return Launcher(word), None
    except ValueError:
        raise UserError(f"--on must be one of {', '.join(Launcher)}, or ray://HOST:10001; got {word!r}") from None


def rendered(config: RunConfig, where: ClusterTarget, run_dir: Path) -> str:
    """Return what the launcher would be given for a run in `run_dir`; start nothing."""
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
    """Start a run; return the exit status: 0 once the run is submitted, or, under Ray, the status of the finished run.

    Under Kubernetes the run's directory is on a volume of the cluster; the head makes the directory there.

    Raises:
        UserError: the run cannot start; the message says what to do.
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
