"""The directory of a run: made once, resumed many times, used by one launcher at a time.

runs/tiny/
  recipe.toml      the resolved recipe, complete, readable by its owner only, since it may hold a secret
  layout           number of the directory's layout; a run of another layout is refused
  tokens.json      bearer token of this launch, readable by its owner only
  events.jsonl     the run's events (written by the controller)
  checkpoints/     (written by the training loop)
  logs/            one file per process
  report.html, learning_curve.png, …
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from pipelinerl.config.recipe import RunConfig, check_layout, load_run, save, write_layout
from pipelinerl.errors import UserError
from pipelinerl.system.files import system_words, write_private

_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run, and its recipe."""

    path: Path
    config: RunConfig

    @property
    def recipe(self) -> Path:
        """The path of the resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def tokens(self) -> Path:
        """The path of this launch's secret: `{"token": …}`."""
        return self.path / "tokens.json"

    @property
    def events(self) -> Path:
        """The path of the event log."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs."""
        return self.path / "logs"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this launcher, and write a new bearer token into it.

        Raises:
            UserError: another launcher has locked the directory.
        """
        lock = self.path / _LOCK
        try:
            held = _lock(lock).acquire()
        except Timeout:
            holder = lock.read_text() or "unknown"
            raise UserError(
                f"{self.path} is being run by process {holder}; stop that run first, or start another one"
            ) from None
        with held:
            lock.write_text(str(os.getpid()))
            write_private(self.tokens, json.dumps({"token": secrets.token_urlsafe(32)}))
            yield


def _lock(path: Path) -> BaseFileLock:
    """Return a lock that the kernel releases when the process that holds it dies. A plain lock file would stay
    behind.
    """
    return FileLock(path, timeout=0, mode=0o600, fallback_to_soft=False)


def holder_of(path: Path) -> str | None:
    """Return the process id of the launcher that has locked the directory; None if it is not locked."""
    lock = path / _LOCK
    if not lock.is_file():
        return None
    try:
        with _lock(lock).acquire():
            return None
    except Timeout:
        return lock.read_text() or "unknown"


def namesakes(config: RunConfig) -> Iterator[Path]:
    """Yield the directories of earlier runs of this name: tiny, tiny-2, tiny-3, … up to the first number that is
    missing.
    """
    for number in count(1):
        path = _numbered(config, number).run_directory
        if not os.path.lexists(path):
            return
        yield path


def refuse_namesake(config: RunConfig, *, by_hand: Callable[[Path], str]) -> None:
    """Refuse to start if a run of this name is live: a second run on this machine is rarely intended.

    Args:
        by_hand: describes which process uses a directory without a launcher; empty if none does.

    Raises:
        UserError: a run is live; the message lists the commands for it.
    """
    for path in namesakes(config):
        runner = f"process {pid}" if (pid := holder_of(path)) is not None else by_hand(path)
        if runner:
            raise UserError(
                f"a run of this name is live in {path} ({runner}): to look at it, pipelinerl top {path}; to end it, "
                f"pipelinerl stop {path}; to resume it once it has ended, pipelinerl run --resume {path}; to start "
                "another run on this machine, add --new"
            )


def _numbered(config: RunConfig, number: int) -> RunConfig:
    name = config.run.name if number == 1 else f"{config.run.name}-{number}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def create(config: RunConfig, *, claim: Callable[[RunConfig], bool] = lambda config: True) -> RunDirectory:
    """Make the directory of a new run. If its name is taken, append a number: tiny, tiny-2, tiny-3, …

    Args:
        claim: claims the name at other locations that the run writes to; returns False if another run has it there.

    Raises:
        UserError: the directory cannot be made.
    """
    for number in count(1):
        chosen = _numbered(config, number)
        try:
            chosen.run_directory.mkdir(parents=True, exist_ok=False)
        except OSError as error:
            if os.path.lexists(chosen.run_directory):
                continue
            raise UserError(f"run.directory: {chosen.run_directory} cannot be made: {error}") from None
        with ExitStack() as undoing:
            undoing.callback(shutil.rmtree, chosen.run_directory, ignore_errors=True)
            if not claim(chosen):
                continue
            directory = RunDirectory(chosen.run_directory.resolve(), chosen)
            try:
                write_layout(directory.path)
                save(chosen, directory.recipe)
            except OSError as error:
                raise UserError(f"run.directory: {directory.path} cannot be written: {system_words(error)}") from None
            undoing.pop_all()
            return directory
    raise AssertionError("numbers do not end")


def refuse_taken(path: Path) -> None:
    """Refuse a path that a new run cannot use as its directory.

    Raises:
        UserError: the path exists.
    """
    if path.exists():
        raise UserError(f"{path} exists, and holds no run: expected {path / 'recipe.toml'} or nothing; move it away")


def open_run(path: Path) -> RunDirectory:
    """Return the directory of a run that was started before; change nothing.

    Raises:
        UserError: there is no run in `path`, or another version of the project began it.
        RecipeError: its recipe is damaged.
    """
    check_layout(path)
    return RunDirectory(path.resolve(), load_run(path))
