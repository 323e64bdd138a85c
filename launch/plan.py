"""Which processes a run consists of, as a value: pure, so that it can be printed, compared and tested.

    redis ──▶ controller ──▶ engine-0 … engine-N
                        ├──▶ parameter-server-0 … ──▶ trainer      (servers only where weights are pulled)
                        ├──▶ trainer-rank-1 … trainer-rank-R       (only where the trainer is of several processes)
                        ├──▶ tracker                           (only where the recipe names trackers)
                        └──▶ actor-0 … actor-M          ▶ = is started once the one before is healthy

Every process is `python -m pipelinerl.cli <role>` with the arguments

    --recipe <run>/recipe.toml --run-dir <run> --name <name> --token-file <file> --controller-url …

where the stream server is the embedded one, `--redis-url`, and, where it serves HTTP, `--port`. They stop in the order
actors, trainer, engines, parameter servers, controller, tracker and redis, so that each finds what it needs. The
controller's exit with status 0 completes the run. What dies is started again. Engines and trainer see the GPUs that
`placement` gives them and no other, and are told their share of the memory where they share one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from launch.devices import Devices
from launch.placement import TRAINER, Assignment, Placement, place
from pipelinerl.config.recipe import RunConfig

#: Up to this many cores a process of its own core is worth more than the scheduler's freedom.
_SMALL_MACHINE = 8

_LOOPBACK = "127.0.0.1"


class OnExit(StrEnum):
    """What the end of a process means. Exit status 2 (what the user gave is wrong) is never worth another try."""

    RESTART = "restart"
    """It should have gone on: start it again, within its budget."""
    DONE = "done"
    """Status 0 is the end of its work, while the run goes on; any other is a death, as above."""
    COMPLETE = "complete"
    """Status 0 completes the run; any other is a death, as above."""
    SPARE = "spare"
    """Started again within its budget, like any other; after that the run goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process.

    Attributes:
        argv: program and arguments.
        env: added to the launcher's environment.
        health: `http://…` that answers 200, or `redis://host:port/<file of its password>` that answers PING, once it is
            ready; None: at once.
        after: names of the processes that must be healthy before this one is started.
        restarts: how often it may be started again; staying up for a while gives the budget back.
        stop_order: lower stops earlier; equal ones together.
        group: those of one group live and die together: when one has died, all are started again.
        cpu: cores it may run on; None: all.
        log_name: file below the run's `logs/`.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    after: tuple[str, ...] = ()
    on_exit: OnExit = OnExit.RESTART
    restarts: int = 3
    stop_order: int = 0
    group: str | None = None
    cpu: tuple[int, ...] | None = None

    @property
    def log_name(self) -> str:
        """The name of the process' log file."""
        return f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes in the order in which they may start.

    Raises:
        ValueError: two share a name, or one waits for a process that does not come before it.
    """

    specs: tuple[ProcessSpec, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for spec in self.specs:
            if spec.name in seen:
                raise ValueError(f"process names must be unique, got {spec.name!r} twice")
            if missing := set(spec.after) - seen:
                raise ValueError(f"{spec.name} waits for {', '.join(sorted(missing))}, which must come before it")
            seen.add(spec.name)

    def spec(self, name: str) -> ProcessSpec:
        """The process of that name; KeyError when there is none."""
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Loopback ports of the services; `redis` is None when the recipe names a server of its own."""

    controller: int
    engines: tuple[int, ...]
    redis: int | None = None
    parameter_servers: tuple[int, ...] = ()
    trainer: int | None = None
    """Where the processes of a trainer of several meet."""

    @property
    def all(self) -> frozenset[int]:
        """Every port of the run."""
        single = (port for port in (self.redis, self.trainer) if port is not None)
        return frozenset((self.controller, *self.engines, *single, *self.parameter_servers))

    @staticmethod
    def count(config: RunConfig) -> int:
        """Count the ports that the run needs."""
        redis, meeting = config.streams.redis_url is None, config.trainer_processes > 1
        return 1 + config.engine.count + redis + config.servers_to_start + meeting

    @classmethod
    def of(cls, config: RunConfig, free: Sequence[int]) -> Ports:
        """Hand out one free port to each process that listens."""
        left = iter(free)
        return cls(
            controller=next(left),
            engines=tuple(islice(left, config.engine.count)),
            redis=next(left) if config.streams.redis_url is None else None,
            parameter_servers=tuple(islice(left, config.servers_to_start)),
            trainer=next(left) if config.trainer_processes > 1 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all processes of one launch are told, on this machine, whose usable cores are `cores`.

    `placement` is of the processes with which the run begins.
    """

    config: RunConfig
    run_dir: Path
    ports: Ports
    token_file: Path
    cores: Sequence[int]
    placement: Placement = field(default_factory=Placement)
    python: str = sys.executable

    def spec(
        self,
        name: str,
        role: str,
        *,
        port: int | None = None,
        arguments: Sequence[str] = (),
        shown: Mapping[str, str] | None = None,
        **rest: object,
    ) -> ProcessSpec:
        """A process in its role; `arguments` are its own, `shown` is the environment of its devices."""
        config, ports = self.config, self.ports
        argv = [self.python, "-m", "pipelinerl.cli", role, "--recipe", str(self.run_dir / "recipe.toml")]
        argv += ["--run-dir", str(self.run_dir), "--name", name, "--token-file", str(self.token_file)]
        if ports.redis is not None:  # a server of the user's is read from the recipe: its address may hold a secret
            argv += ["--redis-url", f"redis://{_LOOPBACK}:{ports.redis}/0"]
        argv += ["--controller-url", f"http://{_LOOPBACK}:{ports.controller}"]
        argv += [] if port is None else ["--port", str(port)]
        argv += arguments
        env = self._environment(shown or {})
        health = {} if port is None or role == "redis" else {"health": f"http://{_LOOPBACK}:{port}/health"}
        restarts = config.launch.restarts
        return ProcessSpec(name=name, argv=tuple(argv), env=env, restarts=restarts, **{**health, **rest})  # type: ignore[arg-type]

    def engine(self, name: str, *, port: int, type: str | None = None, on: Assignment = Assignment()) -> ProcessSpec:
        """An engine on its devices; one with a `type` was requested of a live run, which does not fail with it."""
        config = self.config
        engine_cores, _ = _pinning(config, self.cores)
        number = int(name.rpartition("-")[2])
        cpu = engine_cores[number % len(engine_cores)] if engine_cores else None
        arguments = _share_setting("engine.memory_share", on, config.engine.memory_share)
        if type is not None:
            arguments += ("--type", type)
            # The recipe's options are those of its own type.
            arguments += ("--set", "engine.options={}") if config.engine.options and type != config.engine.type else ()
        on_exit = OnExit.RESTART if type is None else OnExit.SPARE
        shown = self._shown(type or config.engine.type, config.engine.device, on)
        return self.spec(
            name, "engine", port=port, arguments=arguments, shown=shown, after=("controller",), stop_order=2, cpu=cpu,
            on_exit=on_exit,
        )  # fmt: skip

    def trainer(self, *, after: Sequence[str], arguments: Sequence[str] = ()) -> ProcessSpec:
        """The trainer's process on its devices; of several processes rank 0, on the first of them."""
        on, several = self.placement.of(TRAINER), self.ports.trainer is not None
        _, cpu = _pinning(self.config, self.cores)
        return self.spec(
            TRAINER,
            "trainer",
            arguments=(*arguments, *self._trainer_settings(on)),
            shown=self._trainer_shown(on, rank=0),
            after=tuple(after),
            on_exit=OnExit.DONE,
            stop_order=1,
            group=TRAINER if several else None,
            cpu=None if several else cpu,
        )

    def trainer_rank(self, rank: int, *, after: Sequence[str]) -> ProcessSpec:
        """A further process of the trainer, on a device of its own. It ends with rank 0, so it is stopped later."""
        config, on = self.config, self.placement.of(TRAINER)
        argv = [self.python, "-m", "pipelinerl.cli", "trainer-rank", "--rank", str(rank)]
        argv += ["--recipe", str(self.run_dir / "recipe.toml"), *self._trainer_settings(on)]
        return ProcessSpec(
            name=f"{TRAINER}-rank-{rank}",
            argv=tuple(argv),
            env=self._environment(self._trainer_shown(on, rank=rank)),
            after=tuple(after),
            on_exit=OnExit.DONE,
            restarts=config.launch.restarts,
            stop_order=2,
            group=TRAINER,
        )

    def _trainer_settings(self, on: Assignment) -> tuple[str, ...]:
        share = _share_setting("trainer.memory_share", on, self.config.trainer.memory_share)
        if self.ports.trainer is None:
            return share
        meeting = f'coordinator="{_LOOPBACK}:{self.ports.trainer}",token_file={json.dumps(str(self.token_file))}'
        return (*share, "--set", f"trainer.options.distributed={{{meeting}}}")

    def _trainer_shown(self, on: Assignment, *, rank: int) -> Mapping[str, str]:
        section = self.config.trainer
        if self.ports.trainer is not None:
            on = replace(on, indices=on.indices[rank : rank + 1])
        return self._shown(section.type, section.device, on)

    def _environment(self, shown: Mapping[str, str]) -> Mapping[str, str]:
        return {
            "OMP_NUM_THREADS": str(self.config.launch.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **shown,
        }

    def _shown(self, type: str, device: str, on: Assignment) -> Mapping[str, str]:
        """The environment that shows a process its devices."""
        devices = self.placement.devices
        if type == "jax" and device == "cpu" and devices.each:
            return {"JAX_PLATFORMS": "cpu"}  # whatever it computes with, JAX takes memory of each GPU that it sees
        return devices.environment(on.indices)


def plan(
    config: RunConfig,
    *,
    run_dir: Path,
    ports: Ports,
    token_file: Path,
    cores: Sequence[int],
    devices: Devices = Devices(),
    python: str = sys.executable,
) -> Plan:
    """The processes of a run of `config` on this machine, whose usable cores are `cores` and whose GPUs `devices`.

    Raises:
        RecipeError: the recipe cannot be placed on the devices.
    """
    placement = place(config, devices)
    return processes_of(
        Launch(
            config=config,
            run_dir=run_dir,
            ports=ports,
            token_file=token_file,
            cores=cores,
            placement=placement,
            python=python,
        )
    )


def processes_of(launch: Launch) -> Plan:
    """The processes with which a run begins."""
    config, ports, spec = launch.config, launch.ports, launch.spec
    embedded = ports.redis is not None
    specs = []
    if embedded:
        health = f"redis://{_LOOPBACK}:{ports.redis}{quote(str(launch.run_dir / 'redis' / 'password'))}"
        specs.append(spec("redis", "redis", port=ports.redis, health=health, stop_order=5))
    after = ("redis",) if embedded else ()
    complete = OnExit.COMPLETE
    specs.append(spec("controller", "controller", port=ports.controller, after=after, on_exit=complete, stop_order=4))
    after = ("controller",)
    engines = {f"engine-{number}": port for number, port in enumerate(ports.engines)}
    specs += [launch.engine(name, port=port, on=launch.placement.of(name)) for name, port in engines.items()]
    servers = {f"parameter-server-{number}": port for number, port in enumerate(ports.parameter_servers)}
    specs += [spec(name, "parameter-server", port=port, after=after, stop_order=3) for name, port in servers.items()]
    arguments = ("--set", _servers_setting(ports.parameter_servers)) if servers else ()
    specs.append(launch.trainer(after=(*after, *servers), arguments=arguments))
    specs += [launch.trainer_rank(rank, after=after) for rank in range(1, config.trainer_processes)]
    specs += [spec(f"actor-{number}", "actor", after=after, stop_order=0) for number in range(config.actor.count)]
    if config.trackers.chosen:  # it is stopped after the controller, whose last word it tells
        specs.append(spec("tracker", "tracker", after=after, on_exit=OnExit.SPARE, stop_order=5))
    return Plan(tuple(specs))


def _servers_setting(ports: Sequence[int]) -> str:
    """The change of the recipe that tells the trainer where the parameter servers are."""
    urls = ", ".join(f'"http://{_LOOPBACK}:{port}"' for port in ports)
    return f"parameter_server.urls=[{urls}]"


def _share_setting(key: str, on: Assignment, recipes: float | None) -> tuple[str, ...]:
    """The change of the recipe that tells a process its share, unless the recipe does."""
    return () if on.share in (None, recipes) else ("--set", f"{key}={on.share}")


def _pinning(config: RunConfig, cores: Sequence[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...] | None]:
    """Cores for the engines, dealt in turn, and for the trainer: the last core is the trainer's, the others theirs.

    Decode and training are the two that never rest. Left to the scheduler they meet on one core again and again, each
    time for a whole time slice, which the engine shows as a pause. The rest is light and goes where there is room.
    """
    fits = 2 <= len(cores) <= _SMALL_MACHINE and config.launch.threads == 1
    if config.launch.pin == "none" or not fits:
        return [], None
    return [(core,) for core in cores[:-1]], (cores[-1],)
