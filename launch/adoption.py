"""`pipelinerl adopt`: watch the roles of a run that were started one by one on this machine; restart those that die.

A role that dies is restarted with its arguments, environment and working directory, as a child of this process and with
the restart budget of `pipelinerl run` (`launch.process`). A role that ends by itself, on SIGTERM or on Ctrl-C removes
its record (`pipelinerl.system.process_record`) and is not restarted. Roles that start later are watched, too.
When the run is over, or on Ctrl-C, only the roles that this process has restarted are stopped.

| it waits for | how long | then |
|---|---|---|
| the death of a role | – | restarts it within its budget; continues without it once that is spent |
| the end of the run, recorded by its controller | – | stops what it restarted; exit status 0, or 1 if the run failed |
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from launch.plan import Plan, ProcessSpec
from launch.run_directory import held
from launch.supervisor import RunOutcome, Supervisor
from pipelinerl.config.recipe import check_layout, load_run
from pipelinerl.errors import UserError
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.roles.catalogue import role_of
from pipelinerl.roles.role import OnExit
from pipelinerl.system.process_record import ProcessRecord, read_records

_LOOK_S: Final = 0.25


class _Adoption:
    def __init__(self, run_dir: Path, announce: Callable[[str], None]) -> None:
        section = load_run(run_dir).launch
        self._run_dir = run_dir
        self._announce = announce
        self._restarts = section.restarts
        self._watched: dict[str, tuple[ProcessRecord, ProcessSpec]] = {}
        self._supervisor = Supervisor(
            Plan(()),
            run_dir,
            start_timeout_s=section.start_timeout_s,
            grace_s=section.grace_s,
            announce=announce,
            on_tick=self._look,
            tick_every_s=_LOOK_S,
        )

    def run(self) -> int:
        self._look()
        if not self._watched:
            raise UserError(
                f"no role of {self._run_dir} runs on this machine; start its roles first, each with this run's "
                "directory (docs/use/services.md)"
            )
        result = self._supervisor.run()
        if result.outcome is RunOutcome.STOPPED:
            self._announce("the roles that were not restarted keep running, unwatched")
        else:
            self._announce(f"{result.outcome}: {result.message}")
        return result.exit_status

    def _look(self) -> None:
        records = read_records(self._run_dir)
        ours = self._supervisor.pids.values()
        for name, record in records.items():
            is_known = name in self._watched and self._watched[name][0] == record
            if not is_known and record.pid not in ours and record.is_alive:
                self._watched[name] = record, _spec_of(record, self._restarts)
                self._announce(f"watching {name} (process {record.pid})")
        for name, (record, spec) in list(self._watched.items()):
            if record.is_alive:
                continue
            del self._watched[name]
            left = record.ended_without and not Path(record.ended_without).exists()
            if records.get(name) == record and not left:
                began_s = record.started / os.sysconf("SC_CLK_TCK")
                self._supervisor.revive(spec, up_s=time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
                continue
            self._announce(f"{record.name} has ended")
            if record.role == "controller" and (end := tell(read_events(self._run_dir / "events.jsonl")).finished):
                failed = end.get("kind") == "run_failed"
                self._supervisor.end(RunOutcome.FAILED if failed else RunOutcome.COMPLETED, str(end.get("reason", "")))


def _spec_of(record: ProcessRecord, restarts: int) -> ProcessSpec:
    """Return the spec that repeats the live process; raise `UserError` if another user's process has the record."""
    role = role_of(record.role)
    proc = Path(f"/proc/{record.pid}")
    try:
        argv = record.argv or tuple(os.fsdecode(word) for word in _words(proc / "cmdline"))
        variables = (os.fsdecode(word).partition("=") for word in _words(proc / "environ"))
        env = {name: value for name, _, value in variables}
    except OSError as error:
        raise UserError(
            f"{record.name} (process {record.pid}) cannot be adopted: {error.strerror}; adopt it as its user"
        ) from None
    return ProcessSpec(
        name=record.name,
        argv=argv,
        env=env,
        inherits=False,
        cwd=Path(record.cwd),
        on_exit=OnExit.SPARE if role.on_exit is OnExit.RESTART else role.on_exit,
        restarts=restarts,
        stop_order=role.stop_order,
    )


def _words(path: Path) -> list[bytes]:
    return path.read_bytes().rstrip(b"\0").split(b"\0")


def adopt(run_dir: Path, *, announce: Callable[[str], None] = partial(print, flush=True)) -> int:
    """Watch the roles until the run is over; return the exit status. Raises `UserError` if no role can be watched."""
    check_layout(run_dir)
    if not (run_dir / "recipe.toml").is_file():
        raise UserError(f"{run_dir} has no run yet: recipe.toml is missing; start its controller first")
    with held(run_dir):
        return _Adoption(run_dir.resolve(), announce).run()
