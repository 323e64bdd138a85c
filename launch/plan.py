"""Which processes a run consists of, as a value: pure, so that it can be printed, compared and tested.

    redis ──▶ controller ──▶ engine-0 … engine-N
                        ├──▶ parameter-server-0 … ──▶ trainer      (servers only where weights are pulled)
                        ├──▶ trainer-rank-1 … trainer-rank-R       (only where the trainer is of several processes)
                        ├──▶ tracker                           (only where the recipe names trackers)
                        ├──▶ verifier-0 … verifier-V               (only where services judge)
                        └──▶ actor-0 … actor-M          ▶ = is started once the one before is healthy

Every process is `python -m pipelinerl.cli <role>` with the arguments

    --recipe <run>/recipe.toml --run-dir <run> --name <name> --token-file <file> --controller-url …

where the stream server is the embedded one, `--redis-url`, and, where it serves HTTP, `--port`. They stop in the order
actors, trainer, engines, parameter servers, controller, tracker and redis, so that each finds what it needs. The
controller's exit with status 0 completes the run. What dies is started again. Engines and trainer see the GPUs that
`placement` gives them and no other, and are told their share of the memory where they share one.

Where there are several hosts (`launch.spread` says which process is on which), each is addressed by its host's, and
binds that; `Plan.of_host` is the share of one, whose supervisor waits for what is elsewhere by its health address.
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

from launch.hosts import LOCALHOST, Host, HostAssignment
from launch.placement import TRAINER, Assignment, Placement
from launch.spread import spread
from pipelinerl.config.recipe import RunConfig

#: Up to this many cores a process of its own core is worth more than the scheduler's freedom.
_SMALL_MACHINE = 8

#: How threads of one process wait for each other. Many share few cores, so none spins for long; but several that sleep
#: at once are woken so slowly that two of them decode half as fast as one.
_ALONE = {"OMP_WAIT_POLICY": "PASSIVE"}
_TOGETHER = {"GOMP_SPINCOUNT": "20000"}
#: The C library asks a name server for 5 s, twice, before it gives up. torch's TCPStore looks up the name of each peer
#: that connects: where no server knows it, that bounds what a new weight group waits for it.
_RESOLVER = "timeout:1 attempts:2"
#: Names the file with the password of the streams that the launcher started, for roles on whatever host.
_PASSWORD_VARIABLE = "PIPELINERL_REDIS_PASSWORD_FILE"


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
        host: name of the host that it runs on.
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
    host: str = LOCALHOST.name

    @property
    def log_name(self) -> str:
        """The name of the process' log file."""
        return f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes in the order in which they may start; `elsewhere` are health addresses of other hosts', by name.

    Raises:
        ValueError: two share a name, or one waits for a process that does not come before it.
    """

    specs: tuple[ProcessSpec, ...]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set(self.elsewhere)
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

    def of_host(self, host: str) -> Plan:
        """The share of one host."""
        others = {spec.name: spec.health for spec in self.specs if spec.host != host and spec.health is not None}
        return Plan(tuple(spec for spec in self.specs if spec.host == host), others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of the services; `redis` is None when the recipe names a server of its own."""

    controller: int
    engines: tuple[int, ...]
    redis: int | None = None
    parameter_servers: tuple[int, ...] = ()
    verifiers: tuple[int, ...] = ()
    trainer: int | None = None
    """Where the processes of a trainer of several meet."""

    @property
    def all(self) -> frozenset[int]:
        """Every port of the run."""
        single = (port for port in (self.redis, self.trainer) if port is not None)
        return frozenset((self.controller, *self.engines, *single, *self.parameter_servers, *self.verifiers))

    @staticmethod
    def count(config: RunConfig) -> int:
        """Count the ports that the run needs."""
        redis, meeting = config.streams.redis_url is None, config.trainer_processes > 1
        return 1 + config.engine.count + redis + config.servers_to_start + config.verification.services + meeting

    @classmethod
    def of(cls, config: RunConfig, free: Sequence[int]) -> Ports:
        """Hand out one free port to each process that listens."""
        left = iter(free)
        return cls(
            controller=next(left),
            engines=tuple(islice(left, config.engine.count)),
            redis=next(left) if config.streams.redis_url is None else None,
            parameter_servers=tuple(islice(left, config.servers_to_start)),
            verifiers=tuple(islice(left, config.verification.services)),
            trainer=next(left) if config.trainer_processes > 1 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all processes of one launch are told; `cores` are the usable ones of this machine.

    `placement` is of the processes with which the run begins, and `homes` says which host each is on: this machine's
    loopback, where nothing else is said.
    """

    config: RunConfig
    run_dir: Path
    ports: Ports
    token_file: Path
    cores: Sequence[int]
    placement: Placement = field(default_factory=Placement)
    homes: HostAssignment = field(default_factory=HostAssignment)
    python: str = sys.executable

    def at(self, name: str, port: int | None) -> str:
        """`host:port` of a process that listens."""
        return f"{self.homes.of(name).address}:{port}"

    def assignment_of(self, name: str) -> Assignment:
        """The devices of a process; of the ranks of a trainer each has its own, of those of its host."""
        on, rank = self.placement.of(name), rank_of(name)
        if rank is None or self.ports.trainer is None or (rank and on.indices):
            return on
        whole = self.placement.of(TRAINER)
        return replace(whole, indices=whole.indices[rank : rank + 1])

    @property
    def placement_of_head(self) -> Placement:
        """That of the processes of the head, on its own devices."""
        head = self.homes.head
        own = {name: on for name, on in self.placement.assignments.items() if self.homes.of(name) is head}
        return replace(self.placement, assignments=own)

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
        config, ports, home = self.config, self.ports, self.homes.of(name)
        argv = [self.python, "-m", "pipelinerl.cli", role, "--recipe", str(self.run_dir / "recipe.toml")]
        argv += ["--run-dir", str(self.run_dir), "--name", name, "--token-file", str(self.token_file)]
        if ports.redis is not None:  # a server of the user's is read from the recipe: its address may hold a secret
            argv += ["--redis-url", f"redis://{self.at('redis', ports.redis)}/0"]
        argv += ["--controller-url", f"http://{self.at('controller', ports.controller)}"]
        argv += [] if port is None or home.address == LOCALHOST.address else ["--host", home.address]
        argv += [] if port is None else ["--port", str(port)]
        argv += arguments
        env = self._environment(shown or {})
        health = {} if port is None or role == "redis" else {"health": f"http://{home.address}:{port}/health"}
        rest = {"restarts": config.launch.restarts, "host": home.name, **health, **rest}
        return ProcessSpec(name=name, argv=tuple(argv), env=env, **rest)  # type: ignore[arg-type]

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
        shown = self._shown(self.homes.of(name), type or config.engine.type, config.engine.device, on)
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
            shown=self._trainer_shown(TRAINER),
            after=tuple(after),
            on_exit=OnExit.DONE,
            stop_order=1,
            group=TRAINER if several else None,
            cpu=None if several else cpu,
        )

    def trainer_rank(self, rank: int, *, after: Sequence[str]) -> ProcessSpec:
        """A further process of the trainer, on a device of its own. It ends with rank 0, so it is stopped later."""
        config, on = self.config, self.placement.of(TRAINER)
        name = f"{TRAINER}-rank-{rank}"
        argv = [self.python, "-m", "pipelinerl.cli", "trainer-rank", "--rank", str(rank)]
        argv += ["--recipe", str(self.run_dir / "recipe.toml"), *self._trainer_settings(on)]
        return ProcessSpec(
            name=name,
            argv=tuple(argv),
            env=self._environment(self._trainer_shown(name)),
            after=tuple(after),
            on_exit=OnExit.DONE,
            restarts=config.launch.restarts,
            stop_order=2,
            group=TRAINER,
            host=self.homes.of(name).name,
        )

    def _trainer_settings(self, on: Assignment) -> tuple[str, ...]:
        share = _share_setting("trainer.memory_share", on, self.config.trainer.memory_share)
        if self.ports.trainer is None:
            return share
        meeting = f'coordinator="{self.at(TRAINER, self.ports.trainer)}",token_file={json.dumps(str(self.token_file))}'
        return (*share, "--set", f"trainer.options.distributed={{{meeting}}}")

    def _trainer_shown(self, name: str) -> Mapping[str, str]:
        section = self.config.trainer
        return self._shown(self.homes.of(name), section.type, section.device, self.assignment_of(name))

    def _environment(self, shown: Mapping[str, str]) -> Mapping[str, str]:
        password = {_PASSWORD_VARIABLE: str(self._redis_password)} if self._streams_are_elsewhere else {}
        return {
            "OMP_NUM_THREADS": str(self.config.launch.threads),
            **(_ALONE if self.config.launch.threads == 1 else _TOGETHER),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "RES_OPTIONS": _RESOLVER,
            **password,
            **shown,
        }

    @property
    def _redis_password(self) -> Path:
        return self.run_dir / "redis" / "password"

    @property
    def _streams_are_elsewhere(self) -> bool:
        """Is the embedded server at an address at which a role does not look for its password by itself?"""
        return self.ports.redis is not None and self.homes.of("redis").address != LOCALHOST.address

    def _shown(self, home: Host, type: str, device: str, on: Assignment) -> Mapping[str, str]:
        """The environment that shows a process its devices."""
        devices = home.devices if self.homes.are_several else self.placement.devices
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
    hosts: Sequence[Host] = (LOCALHOST,),
    python: str = sys.executable,
) -> Plan:
    """The processes of a run of `config` on these hosts; `cores` are the usable ones of the host that asks.

    Raises:
        RecipeError: the recipe cannot be placed on the hosts.
    """
    homes, placement = spread(config, hosts)
    return processes_of(
        Launch(
            config=config,
            run_dir=run_dir,
            ports=ports,
            token_file=token_file,
            cores=cores,
            placement=placement,
            homes=homes,
            python=python,
        )
    )


def rank_of(name: str) -> int | None:
    """The rank of a trainer's process, by its name; None for all others."""
    number = name.removeprefix(f"{TRAINER}-rank-")
    return 0 if name == TRAINER else int(number) if number != name else None


def processes_of(launch: Launch) -> Plan:
    """The processes with which a run begins."""
    config, ports, spec = launch.config, launch.ports, launch.spec
    embedded = ports.redis is not None
    specs = []
    if embedded:
        health = f"redis://{launch.at('redis', ports.redis)}{quote(str(launch.run_dir / 'redis' / 'password'))}"
        specs.append(spec("redis", "redis", port=ports.redis, health=health, stop_order=5))
    after = ("redis",) if embedded else ()
    complete = OnExit.COMPLETE
    specs.append(spec("controller", "controller", port=ports.controller, after=after, on_exit=complete, stop_order=4))
    after = ("controller",)
    engines = {f"engine-{number}": port for number, port in enumerate(ports.engines)}
    specs += [launch.engine(name, port=port, on=launch.placement.of(name)) for name, port in engines.items()]
    servers = {f"parameter-server-{number}": port for number, port in enumerate(ports.parameter_servers)}
    specs += [spec(name, "parameter-server", port=port, after=after, stop_order=3) for name, port in servers.items()]
    arguments = ("--set", _servers_setting([launch.at(*server) for server in servers.items()])) if servers else ()
    specs.append(launch.trainer(after=(*after, *servers), arguments=arguments))
    specs += [launch.trainer_rank(rank, after=after) for rank in range(1, config.trainer_processes)]
    specs += [
        spec(f"verifier-{number}", "verifier", port=port, after=after, on_exit=OnExit.DONE, stop_order=2)
        for number, port in enumerate(ports.verifiers)
    ]
    specs += [spec(f"actor-{number}", "actor", after=after, stop_order=0) for number in range(config.actor.count)]
    if config.trackers.chosen:  # it is stopped after the controller, whose last word it tells
        specs.append(spec("tracker", "tracker", after=after, on_exit=OnExit.SPARE, stop_order=5))
    return Plan(tuple(specs))


def _servers_setting(addresses: Sequence[str]) -> str:
    """The change of the recipe that tells the trainer where the parameter servers are."""
    urls = ", ".join(f'"http://{address}"' for address in addresses)
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
