"""The processes of a run as a value: pure, so that it can be printed, compared and tested.

    redis ──▶ controller ──▶ engine-0 … engine-N
                        ├──▶ parameter-server-0 … ──▶ trainer      (servers only if weights are pulled)
                        ├──▶ trainer-rank-1 … trainer-rank-R       (only if the trainer has several processes)
                        ├──▶ tracker                               (only if the recipe names trackers)
                        ├──▶ verifier-0 … verifier-V               (only if verifier services judge)
                        └──▶ actor-0 … actor-M          ▶ = starts once the process before it is healthy

Every process is `python -m pipelinerl.cli ROLE …`. `pipelinerl.roles.catalogue` describes each role: its options, its
start and stop order, and what its exit means. Processes stop in the order actors, trainer, engines, parameter servers,
controller, tracker and redis, so that each still finds the services that it needs. The run completes when the
controller exits with status 0; other processes that die are restarted. Engines and trainer see only the GPUs that
`launch.placement` assigns to them, and are given a fraction of the memory of a GPU that they share.

On several hosts each process binds its host's address and is reached there. `Plan.of_host` returns the processes of one
host; its supervisor waits for processes of other hosts through their health addresses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from launch.hosts import LOCALHOST, Host
from launch.placement import TRAINER, Assignment, Placement, spread
from pipelinerl.config.recipe import RunConfig
from pipelinerl.roles import catalogue as roles
from pipelinerl.roles.role import REDIS_PASSWORD_VARIABLE, OnExit, Role, RoleOptions
from pipelinerl.system import cores

#: Up to this number of cores, pinning a process to its own core beats leaving it to the scheduler.
_SMALL_MACHINE = 8

#: OpenMP settings for how the threads of a process wait for work. A single thread sleeps, because many processes share
#: few cores. Several threads spin briefly before they sleep: waking them is so slow that two would decode half as fast
#: as one.
_ONE_THREAD = {"OMP_WAIT_POLICY": "PASSIVE"}
_SEVERAL_THREADS = {"GOMP_SPINCOUNT": "20000"}
#: Resolver options that limit each look-up of a host name to two tries of 1 s; the C library's default is two tries of
#: 5 s. torch's TCPStore looks up the name of each peer that connects, so a name that no server knows delays every new
#: weight group.
_RESOLVER = "timeout:1 attempts:2"
#: Seconds that the tracker has for its last uploads, a little more than it takes at most (`roles.tracker_role`).
_UPLOAD_S: Final = 65.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process.

    Attributes:
        argv: program and arguments.
        env: added to the launcher's environment, or all of it unless the process `inherits`.
        cwd: working directory; None for the launcher's.
        health: address that shows when the process is ready: an `http://…` URL answers with 200, and
            `redis://host:port/<password file>` answers PING. None if the process is ready immediately.
        after: names of the processes that must be healthy before this one is started.
        restarts: how often the process may be restarted; time without a death restores restarts (`RestartBudget`).
        stop_order: processes with lower numbers stop earlier; those with equal numbers stop together.
        grace_s: seconds from SIGTERM to SIGKILL, if longer than the launcher's own.
        group: name of a group whose processes are all restarted if one of them dies; None without a group.
        gpus: number of GPUs that the process holds; its share of a GPU that it shares.
        cpu: cores that the process may run on; None for all.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    inherits: bool = True
    cwd: Path | None = None
    health: str | None = None
    after: tuple[str, ...] = ()
    on_exit: OnExit = OnExit.RESTART
    restarts: int = 3
    stop_order: int = 0
    grace_s: float = 0.0
    group: str | None = None
    gpus: float = 0.0
    cpu: tuple[int, ...] | None = None
    host: str = LOCALHOST.name


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes in start order; `elsewhere` has the health addresses of processes on other hosts, by name.

    Raises:
        ValueError: two processes share a name, or a process waits for one that is missing or comes later.
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

    def of_host(self, host: str) -> Plan:
        """Return the plan of this host's processes; `elsewhere` has the health addresses of all other processes."""
        others = {spec.name: spec.health for spec in self.specs if spec.host != host and spec.health is not None}
        return Plan(tuple(spec for spec in self.specs if spec.host == host), others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a run: the values from which the processes' command lines and environments are made.

    Attributes:
        ports: port of each process that listens, by its name; all trainer ranks connect to the trainer's port. Without
            an embedded stream server, `redis` has no port.
        placement: the host and devices of each process that the run begins with.
        cores: usable cores of this machine; empty if the run is planned for other machines.
    """

    config: RunConfig
    run_dir: Path
    ports: Mapping[str, int]
    placement: Placement = field(default_factory=Placement)
    cores: Sequence[int] = ()
    python: str = sys.executable

    @classmethod
    def on(cls, hosts: Sequence[Host], config: RunConfig, *, ports: Iterable[int], **rest: Any) -> Launch:
        """Place the run on these hosts, with ports from `ports`; raise `RecipeError` if the recipe does not fit."""
        by_name = dict(zip(listening(config), ports, strict=False))
        return cls(config=config, ports=by_name, placement=spread(config, hosts), **rest)

    @property
    def token_file(self) -> Path:
        return self.run_dir / "tokens.json"

    def at(self, name: str) -> str:
        return f"{self.placement.host_of(name).address}:{self.ports[name]}"

    def assignment_of(self, name: str) -> Assignment:
        """Return the devices of a process; each of several trainer ranks gets one device, on the rank's own host."""
        on, rank = self.placement.of(name), rank_of(name)
        if rank is None or TRAINER not in self.ports or (rank and on.indices):
            return on
        whole = self.placement.of(TRAINER)
        return replace(whole, indices=whole.indices[rank : rank + 1])

    def spec(
        self,
        role: Role,
        name: str,
        *,
        port: int | None = None,
        changes: Sequence[str] = (),
        own: Mapping[str, object] | None = None,
        shown: Mapping[str, str] | None = None,
        after: Sequence[str] = (),
        **rest: object,
    ) -> ProcessSpec:
        """Return the spec of a process that runs this role.

        Args:
            changes: overrides of recipe keys for this process alone.
            own: command-line options that only this role has.
            shown: environment variables that make only the process's devices visible to it.
            after: names of processes that the process waits for, in addition to those that its role waits for.
            rest: fields of `ProcessSpec` that replace the values derived from the role.
        """
        home, streams = self.placement.host_of(name), "redis" in self.ports
        if role.port is not None:
            port = port or self.ports[name]
        options = RoleOptions(
            recipe=str(self.run_dir / "recipe.toml"),
            name=name,
            run_dir=self.run_dir,
            # The address of the user's own server may hold a password, so processes read it from the recipe instead.
            redis_url=f"redis://{self.at('redis')}/0" if streams else None,
            controller_url=f"http://{self.at('controller')}",
            token_file=self.token_file,
            host=home.address,
            port=port or 0,
            changes=list(changes),
        )
        fields = {
            "health": None if port is None else f"http://{home.address}:{port}/health",
            "after": (*(each for each in role.after if each != "redis" or streams), *after),
            "on_exit": role.on_exit,
            "stop_order": role.stop_order,
            "restarts": self.config.launch.restarts,
            "host": home.name,
            **rest,
        }
        argv = (self.python, "-P", "-m", "pipelinerl.cli", *role.arguments(options, **(own or {})))
        return ProcessSpec(name=name, argv=argv, env=self._environment(shown or {}), **fields)  # type: ignore[arg-type]

    def engine(
        self, name: str, *, port: int | None = None, type: str | None = None, on: Assignment | None = None
    ) -> ProcessSpec:
        """Return the spec of an engine; one that is requested live has a `type`, and devices `on`, and may fail."""
        config, on = self.config, self.placement.of(name) if on is None else on
        engine_cores, _ = _pinning(config, self.cores)
        number = int(name.rpartition("-")[2])
        own = engine_cores[number % len(engine_cores)] if engine_cores else None
        changes = _share_setting("engine.memory_share", on, config.engine.memory_share)
        if config.engine.options and type not in (None, config.engine.type):
            changes += ("engine.options={}",)  # the recipe's options are for another engine type
        return self.spec(
            roles.engine,
            name,
            port=port,
            changes=changes,
            own={"type": type},
            shown={**self._shown(name, "engine", type, on), **self._moves_to(own)},
            gpus=on.gpus,
            cpu=None if self._may_take_turns else own,
            on_exit=OnExit.RESTART if type is None else OnExit.SPARE,
        )

    @property
    def _servers(self) -> list[str]:
        return list(_numbered("parameter-server", self.config.servers_to_start))

    @property
    def server_settings(self) -> tuple[str, ...]:
        """The override that names the parameter servers which the launcher starts; empty if it starts none."""
        urls = ", ".join(f'"http://{self.at(server)}"' for server in self._servers)
        return (f"parameter_server.urls=[{urls}]",) if urls else ()

    def trainer(self) -> ProcessSpec:
        """Return the spec of the trainer (rank 0 of several processes), which starts after the parameter servers."""
        several = TRAINER in self.ports
        _, cpu = _pinning(self.config, self.cores)
        return self.spec(
            roles.trainer,
            TRAINER,
            changes=(*self.server_settings, *self._trainer_settings),
            shown={**self._shown(TRAINER, "trainer"), **self._moves_to(cpu)},
            after=self._servers,
            gpus=self.assignment_of(TRAINER).gpus,
            group=TRAINER if several else None,
            cpu=None if several or self._may_take_turns else cpu,
        )

    def trainer_rank(self, rank: int) -> ProcessSpec:
        """Return the spec of a trainer process of rank 1 or above, which has its own device and stops after rank 0."""
        name = roles.trainer_rank.numbered(rank)
        return self.spec(
            roles.trainer_rank,
            name,
            changes=self._trainer_settings,
            own={"rank": rank},
            shown=self._shown(name, "trainer"),
            gpus=self.assignment_of(name).gpus,
            group=TRAINER,
        )

    @property
    def _trainer_settings(self) -> tuple[str, ...]:
        on = self.placement.of(TRAINER)
        share = _share_setting("trainer.memory_share", on, self.config.trainer.memory_share)
        if TRAINER not in self.ports:
            return share
        meeting = f'coordinator="{self.at(TRAINER)}",token_file={json.dumps(str(self.token_file))}'
        return (*share, f"trainer.options.distributed={{{meeting}}}")

    @property
    def _may_take_turns(self) -> bool:
        # With several hosts, the controller does not listen on loopback; engines and trainer then take no turns.
        return self.config.may_take_turns and self.placement.head.address == LOCALHOST.address

    def _moves_to(self, own: Sequence[int] | None) -> Mapping[str, str]:
        """Return the variable that names a process's own cores, if it may also take turns with all cores."""
        return {cores.VARIABLE: ",".join(map(str, own))} if own and self._may_take_turns else {}

    def _environment(self, shown: Mapping[str, str]) -> Mapping[str, str]:
        # Roles find the embedded server's password file themselves only if the server's address is loopback.
        has_one = self.config.launch.threads == 1 and not self._may_take_turns
        away = "redis" in self.ports and self.placement.head.address != LOCALHOST.address
        return {
            "OMP_NUM_THREADS": str(self.config.launch.threads),
            **(_ONE_THREAD if has_one else _SEVERAL_THREADS),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "RES_OPTIONS": _RESOLVER,
            **({REDIS_PASSWORD_VARIABLE: str(self.redis_password)} if away else {}),
            **shown,
        }

    @property
    def redis_password(self) -> Path:
        """The password file of the embedded stream server."""
        return self.run_dir / "redis" / "password"

    def _shown(
        self, name: str, part: Literal["engine", "trainer"], type: str | None = None, on: Assignment | None = None
    ) -> Mapping[str, str]:
        devices, section = self.placement.host_of(name).devices, getattr(self.config, part)
        is_on_cpu = section.device == "cpu" and devices.each
        on_cpu = self.config.cpu_variables(part, type or section.type) if is_on_cpu else {}
        return on_cpu or devices.environment((on or self.assignment_of(name)).indices)


def rank_of(name: str) -> int | None:
    """Return the rank of a trainer's process by its name; None for other processes."""
    number = name.removeprefix(f"{TRAINER}-rank-")
    return 0 if name == TRAINER else int(number) if number != name else None


def listening(config: RunConfig) -> Iterator[str]:
    """Yield the names of the processes that need a port, in the order in which ports are assigned."""
    yield "controller"
    yield from map(roles.engine.numbered, range(config.engine.count))
    yield from ["redis"] if config.streams.redis_url is None else []
    yield from _numbered("parameter-server", config.servers_to_start)
    yield from _numbered("verifier", config.verification.services)
    yield from [TRAINER] if config.trainer_processes > 1 else []


def processes_of(launch: Launch) -> Plan:
    """Return the plan of the processes that the run begins with."""
    config = launch.config

    def several(name: str, count: int) -> Iterator[ProcessSpec]:
        return (launch.spec(roles.role_of(name), each) for each in _numbered(name, count))

    # The address of the embedded stream server's health check ends with the path of its password file.
    streams = f"redis://{launch.at('redis')}{quote(str(launch.redis_password))}" if "redis" in launch.ports else None
    return Plan((
        *([launch.spec(roles.redis, "redis", health=streams)] if "redis" in launch.ports else []),
        launch.spec(roles.controller, "controller", changes=launch.server_settings),
        *(launch.engine(roles.engine.numbered(number)) for number in range(config.engine.count)),
        *several("parameter-server", config.servers_to_start),
        launch.trainer(),
        *(launch.trainer_rank(rank) for rank in range(1, config.trainer_processes)),
        *several("verifier", config.verification.services),
        *(launch.spec(roles.actor, roles.actor.numbered(number)) for number in range(config.actor.count)),
        *([launch.spec(roles.role_of("tracker"), "tracker", grace_s=_UPLOAD_S)] if config.trackers.chosen else []),
    ))  # fmt: skip


def _numbered(role: str, count: int) -> Iterator[str]:
    """Yield the names of `count` processes of a plug-in's role, which is only looked up if there are any."""
    return (roles.role_of(role).numbered(number) for number in range(count))


def _share_setting(key: str, on: Assignment, recipes: float | None) -> tuple[str, ...]:
    return () if on.share in (None, recipes) else (f"{key}={on.share}",)


def _pinning(config: RunConfig, cores: Sequence[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...] | None]:
    """Return the cores for engines, to be assigned in turn, and the trainer's core; ([], None) if nothing is pinned.

    The trainer has the last core. Decoding and training use a core all the time. Without pinning, the scheduler often
    puts both on one core for a whole time slice, which pauses the engine. The other processes are light and run on any
    core.
    """
    fits = 2 <= len(cores) <= _SMALL_MACHINE and config.launch.threads == 1
    if config.launch.pin == "none" or not fits:
        return [], None
    return [(core,) for core in cores[:-1]], (cores[-1],)
