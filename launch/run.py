"""`pipelinerl run`: make the run's directory, start its processes, show progress, write a report and a summary.

Three things proceed independently: the supervisor's loop in the main thread, a thread that polls the controller's
status, and the run itself.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from launch import run_directory
from launch.cluster.membership import HeadNode, Members, read_members, write_members
from launch.hosts import LOCALHOST, Host, devices_for
from launch.placement import TRAINER, Placement, check_uses, place, spread
from launch.plan import Launch, listening, processes_of
from launch.run_directory import RunDirectory
from launch.supervisor import EngineProcesses, RunOutcome, RunResult, Supervisor
from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event, EventLog, amount, read_events
from pipelinerl.observability.progress import ProgressDisplay
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.samples import visible
from pipelinerl.observability.status import RunStatus
from pipelinerl.observability.summary import summary
from pipelinerl.system.machine import free_ports

POLL_S = 0.5


class ControllerCalls(Protocol):
    """The calls that the launcher makes to the run's controller; `ControllerClient` satisfies it."""

    def status(self) -> RunStatus:
        """Return the run's status; raise `UserError` if the controller does not answer."""
        ...

    def remove_engine(self, engine: str) -> None:
        """Remove an engine that cannot start; raise `UserError` if the controller is silent or lacks the engine."""
        ...

    def suspend(self) -> None:
        """Ask the controller to save the run's state and end the run; raise `UserError` if no controller answers."""
        ...

    def close(self) -> None:
        """Close the connections to the controller."""
        ...


#: A function of a controller's URL and a bearer token that returns a client of this controller.
Connect = Callable[[str, str], ControllerCalls]


def prepare(config: RunConfig, *, claim: Callable[[RunConfig], bool], members: Members | None) -> Path:
    """Make the directory of a new run, which `resume` then starts; return its path.

    `claim` reserves the run's name elsewhere (see `run_directory.create`). Raises `UserError`, before anything is made,
    if the run cannot be placed on the hosts.
    """
    spread(config, (this_machine(config),) if members is None else members.hosts)
    directory = run_directory.create(config, claim=claim)
    if members is not None:
        write_members(directory.path, members)
    return directory.path


def resume(path: Path, *, connect: Connect) -> int:
    """Run from the newest checkpoint until the run ends, with this machine as the head; return the exit status."""
    directory = run_directory.open_run(path)
    members = read_members(path)
    if members is not None:
        return _launch(directory, launch_on(members, members.hosts[0].name, directory), connect)
    config, cores = directory.config, sorted(os.sched_getaffinity(0))
    ports = free_ports(len(list(listening(config))))
    launch = Launch.on([this_machine(config)], config, run_dir=directory.path, ports=ports, cores=cores)
    return _launch(directory, launch, connect)


def launch_on(members: Members, host: str, directory: RunDirectory) -> Launch:
    """Return the launch of a run on several hosts as `host` sees it; `UserError` if it is unknown or lacks GPUs."""
    launch = members.launch(directory.config, directory.path, cores=sorted(os.sched_getaffinity(0)))
    return replace(launch, placement=launch.placement.knowing(host, devices_for(directory.config, os.environ)))


def this_machine(config: RunConfig) -> Host:
    """Return this machine as the only host of a run, with the devices that the run may use."""
    return replace(LOCALHOST, devices=devices_for(config, os.environ))


def describe_placement(config: RunConfig) -> str:
    """Describe which of this machine's devices each process would use; raise `UserError` if the recipe does not fit."""
    check_uses(config)
    devices = devices_for(config, os.environ)
    if not devices.each:
        return "no NVIDIA GPU to divide"
    return place(config, devices).describe()


def memory_limits(config: RunConfig) -> Mapping[str, int]:
    """Return the bytes of device memory that a process may use, by kind (`trainer`, `engine`).

    Without GPUs, the only key is `all`: the memory of this host, for all processes together. Raises `UserError` if the
    recipe does not fit.
    """
    devices = devices_for(config, os.environ)
    placement = place(config, devices) if devices.each else Placement()
    if not placement.assignments:
        return {"all": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    engines = [placement.bytes_of(name) for name in placement.assignments if name != TRAINER]
    found = {"trainer": placement.bytes_of(TRAINER), "engine": min((e for e in engines if e), default=None)}
    return {kind: size for kind, size in found.items() if size is not None}


def _launch(directory: RunDirectory, launch: Launch, connect: Connect) -> int:
    console = Console()
    with directory.locked():
        config, before = directory.config, len(_events_of(directory))
        token = json.loads(directory.tokens.read_text())["token"]
        controller = connect(f"http://{launch.at('controller')}", token)
        console.print(f"run [bold]{config.run.name}[/] in {directory.path}", highlight=False)
        watch = f"in the browser: pipelinerl watch {directory.path}"
        console.print(watch, highlight=False, markup=False, soft_wrap=True)
        if launch.placement.assignments and len(launch.placement.hosts) == 1:
            console.print(launch.placement.describe(), highlight=False, markup=False)
        with ProgressDisplay(console) as progress, _StatusReader(controller) as reader:

            def announce(text: str) -> None:
                progress.console.print(text, highlight=False, soft_wrap=True)

            def follow() -> None:
                if head is not None:
                    head.follow(supervisor)
                if (status := reader.take()) is not None:
                    progress.show(status)
                    staff.follow(status)

            def suspend() -> bool:
                try:
                    controller.suspend()
                except UserError:
                    return False
                return True

            def end(result: RunResult) -> None:
                if head is None:
                    return
                # The launcher counts a suspended run as completed, but the other nodes must learn that the run can be
                # resumed.
                last = tell(_events_of(directory)).finished or {}
                if result.outcome is RunOutcome.COMPLETED and last.get("kind") == "run_suspended":
                    words = f"suspended; resume with: pipelinerl run --resume {directory.path}"
                    result = RunResult(RunOutcome.STOPPED, words)
                head.end(_judged(result, last))

            members = read_members(directory.path)
            head = None if members is None else HeadNode(launch, members, announce)
            if head is not None:
                head.begin()
            supervisor = Supervisor(
                processes_of(launch).of_host(launch.placement.head.name),
                directory.path,
                start_timeout_s=config.launch.start_timeout_s,
                grace_s=config.launch.grace_s,
                save_s=config.launch.save_s,
                suspend=suspend,
                announce=announce,
                on_tick=follow,
                on_end=end,
                tell_restarts=None if head is None else head.tell_restarts,
            )
            staff = EngineProcesses(supervisor, launch, give_up=reader.give_up)
            result = supervisor.run()
        events = _events_of(directory)[before:]
        record_failure(result, directory, events)
    result = _judged(result, tell(events).finished or {})
    show_end(result, directory, events, console)
    return result.exit_status


def record_failure(result: RunResult, directory: RunDirectory, events: Sequence[Event]) -> None:
    """Write `run_failed` unless the controller, which has ended, wrote it: `events` are those of this launch."""
    if result.outcome is not RunOutcome.FAILED or tell(events).finished is not None:
        return
    reason = result.message.partition("\n")[0].partition("; its log ")[0]
    elapsed_s = max((amount(event, "elapsed_s") for event in events), default=0.0)
    with suppress(OSError), EventLog(directory.events, timeout_s=0.0) as log:
        log.write("run_failed", elapsed_s=elapsed_s, reason=reason)


def show_end(result: RunResult, directory: RunDirectory, events: Sequence[Event], console: Console) -> None:
    """Show how the run ended and how to resume it; `events` are the events of this launch, possibly none."""
    kinds = {event["kind"] for event in events}
    if kinds & {"step", "evaluation"}:  # without a step or an evaluation there is nothing to draw
        files: list[Path] = []
        try:
            files = imported(registry.REPORTS["page"].build)(directory.path)
        except UserError as error:  # a missing report must not hide how the run ended
            console.print(str(error), highlight=False, soft_wrap=True, markup=False)
        page = files[0] if files else None
        console.print(summary(tell(read_events(directory.events)), run_dir=directory.path, report=page))
        for picture in files[1:]:
            console.print(f"learning curve {picture}", highlight=False, soft_wrap=True)
    # A run that failed before it trained would fail again; its message says what to fix.
    if result.outcome is RunOutcome.FAILED and "trainer_ready" in kinds:
        console.print(f"to resume from its newest checkpoint: pipelinerl run --resume {directory.path}", soft_wrap=True)
    style = {RunOutcome.COMPLETED: "green", RunOutcome.STOPPED: "yellow", RunOutcome.FAILED: "red"}[result.outcome]
    last = tell(events).finished or {}
    message = str(last.get("reason", ""))
    match result.outcome, last.get("kind"):
        case RunOutcome.COMPLETED, "run_suspended":
            message = f"{message or 'suspended'}; resume with: pipelinerl run --resume {directory.path}"
        case (RunOutcome.COMPLETED, "run_finished") | (RunOutcome.FAILED, "run_failed"):
            message = message or result.message
        case _:
            message = result.message
    console.print(f"[{style}]{result.outcome}[/]: {escape(visible(message))}", highlight=False, soft_wrap=True)


def _judged(result: RunResult, last: Event) -> RunResult:
    """Return `result`, or a failure if the controller exited with 0 (`COMPLETED`) but had recorded `run_failed`."""
    if result.outcome is RunOutcome.COMPLETED and last.get("kind") == "run_failed":
        return RunResult(RunOutcome.FAILED, str(last.get("reason", "")))
    return result


def _events_of(directory: RunDirectory) -> list[Event]:
    try:
        return read_events(directory.events)
    except OSError:
        return []


class _StatusReader:
    """A thread that polls the run's status from the controller. It ignores errors: the controller may be starting."""

    def __init__(self, controller: ControllerCalls) -> None:
        self._controller = controller
        self._newest: RunStatus | None = None
        self._given_up: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="status", daemon=True)

    def __enter__(self) -> _StatusReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=6.0)
        self._controller.close()

    def take(self) -> RunStatus | None:
        """Return the newest status that was received since the last call; None if there is none."""
        status, self._newest = self._newest, None
        return status

    def give_up(self, engine: str) -> None:
        """Note that a requested engine cannot start; the thread reports this to the controller with its next poll."""
        self._given_up.add(engine)

    def _read(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            while self._given_up:
                with suppress(UserError):
                    self._controller.remove_engine(self._given_up.pop())
            with suppress(UserError):
                self._newest = self._controller.status()
            self._ended.wait(max(0.0, POLL_S - (time.monotonic() - began)))
