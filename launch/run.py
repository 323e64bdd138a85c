"""`pipelinerl run`: make the run's directory, start its processes, show progress, leave a report and a summary.

Three things happen at once and none waits for another: the supervisor's loop in the main thread, a thread that asks the
controller for its status, and the run itself.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from launch import run_directory
from launch.devices import devices_for
from launch.engine_processes import EngineProcesses
from launch.placement import Placement, check_uses, place
from launch.plan import Launch, Ports, processes_of
from launch.run_directory import RunDirectory
from launch.supervisor import RunOutcome, Supervisor
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.observability.events import read_events
from pipelinerl.observability.progress import ProgressDisplay
from pipelinerl.observability.report import write_report
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.status import RunStatus
from pipelinerl.observability.summary import summary
from pipelinerl.system.ports import free_ports

POLL_S = 0.5


class ControllerCalls(Protocol):
    """What the launcher asks of the run's controller; satisfied by `ControllerClient`, which it knows by this alone."""

    def status(self) -> RunStatus:
        """Return what the run is doing; raises UserError when the controller does not answer."""
        ...

    def remove_engine(self, engine: str) -> None:
        """Take out an engine that will not come; raises likewise, and when nobody has that name."""
        ...

    def suspend(self) -> None:
        """End the run with its state saved; raises likewise."""
        ...

    def close(self) -> None:
        """Close its connections."""
        ...


#: Makes them for a URL and a bearer token.
Connect = Callable[[str, str], ControllerCalls]


def start(config: RunConfig, *, claim: Callable[[RunConfig], bool], connect: Connect) -> int:
    """Run a recipe from its beginning; returns the exit status. `claim` is `run_directory.create`'s."""
    placement = placed(config)  # refused before anything is made
    return _launch(run_directory.create(config, claim=claim), placement, connect)


def resume(path: Path, *, connect: Connect) -> int:
    """Go on with a run from its newest checkpoint; returns the exit status."""
    directory = run_directory.open_run(path)
    return _launch(directory, placed(directory.config), connect)


def placed(config: RunConfig) -> Placement:
    """Where the roles of a run would be on this machine's devices.

    Raises:
        UserError: they cannot be there.
    """
    return place(config, devices_for(config, os.environ))


def describe_placement(config: RunConfig) -> str:
    """Where the roles would be, for `pipelinerl check`, whose recipe may be for another machine than this one.

    Raises:
        UserError: there are devices, and the recipe does not fit them.
    """
    check_uses(config)
    devices = devices_for(config, os.environ)
    if not devices.each:
        return "no NVIDIA GPU to divide"
    return place(config, devices).describe()


def report(path: Path) -> list[Path]:
    """Write the learning curve and the report of the run in `path`; returns the files.

    Raises:
        UserError: there is no run in `path`, or no room for a report.
    """
    try:
        files = write_report(path)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise UserError(f"{path} has no readable events.jsonl to report on: {error}") from None
    except OSError as error:
        raise UserError(f"the report of {path} cannot be written: {error}") from None
    return [files.html, files.picture]


def _launch(directory: RunDirectory, placement: Placement, connect: Connect) -> int:
    console = Console()
    with directory.locked():
        config = directory.config
        ports = Ports.of(config, free_ports(Ports.count(config)))
        cores = sorted(os.sched_getaffinity(0))
        launch = Launch(
            config=config,
            run_dir=directory.path,
            ports=ports,
            token_file=directory.tokens,
            cores=cores,
            placement=placement,
        )
        token = json.loads(directory.tokens.read_text())["token"]
        controller = connect(f"http://127.0.0.1:{ports.controller}", token)
        console.print(f"run [bold]{config.run.name}[/] in {directory.path}", highlight=False)
        console.print(
            f"in the browser: pipelinerl watch {directory.path}", highlight=False, markup=False, soft_wrap=True
        )
        if placement.assignments:
            console.print(placement.describe(), highlight=False, markup=False)
        with ProgressDisplay(console) as progress, _StatusReader(controller) as reader:

            def follow() -> None:
                if (status := reader.take()) is not None:
                    progress.show(status)
                    staff.follow(status)

            supervisor = Supervisor(
                processes_of(launch),
                directory.path,
                start_timeout_s=config.launch.start_timeout_s,
                grace_s=config.launch.grace_s,
                save_s=config.launch.save_s,
                suspend=partial(_suspends, controller),
                announce=lambda text: progress.console.print(text, highlight=False, soft_wrap=True),
                on_tick=follow,
            )
            staff = EngineProcesses(supervisor, launch, give_up=reader.give_up)
            result = supervisor.run()
    if directory.events.is_file():
        try:
            _show_report(directory, console)
        except UserError as error:  # how the run has ended is said all the same
            console.print(str(error), highlight=False, soft_wrap=True, markup=False)
    if result.outcome is RunOutcome.FAILED and directory.events.is_file():
        console.print(f"to go on from its newest checkpoint: pipelinerl run --resume {directory.path}", soft_wrap=True)
    style = {RunOutcome.COMPLETED: "green", RunOutcome.STOPPED: "yellow", RunOutcome.FAILED: "red"}[result.outcome]
    message = (result.outcome is RunOutcome.FAILED and _why_it_failed(directory.events)) or result.message
    console.print(f"[{style}]{result.outcome}[/]: {escape(message)}", highlight=False, soft_wrap=True)
    return result.exit_status


def _suspends(controller: ControllerCalls) -> bool:
    """Ask for the run's state to be saved; a controller that does not answer cannot see to that."""
    try:
        controller.suspend()
    except UserError:
        return False
    return True


def _why_it_failed(events: Path) -> str:
    """The controller's sentence, if it has ended the run because that cannot go on; else nothing."""
    try:
        last = tell(read_events(events)).finished or {}
    except (OSError, ValueError):
        return ""
    return str(last.get("reason", "")) if last.get("kind") == "run_failed" else ""


def _show_report(directory: RunDirectory, console: Console) -> None:
    page, picture = report(directory.path)
    history = tell(read_events(directory.events))
    console.print(summary(history, run_dir=directory.path, report=page))
    console.print(f"learning curve {picture}", highlight=False, soft_wrap=True)


class _StatusReader:
    """A thread that keeps the controller's newest status at hand; silence is no error, the run may be starting."""

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
        """What came since the last call."""
        status, self._newest = self._newest, None
        return status

    def give_up(self, engine: str) -> None:
        """Tell the controller, soon, that a requested engine will not come; once more if its status still wants it."""
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
