"""The directory of a run: made once, resumed many times, used by one launcher at a time.

runs/tiny/
  recipe.toml      the resolved recipe, complete, readable by its owner only, since it may hold a secret
  recipe.started.toml  the recipe of the last launch; what differs from it in recipe.toml was edited
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from launch.cluster.membership import read_members
from pipelinerl.config.recipe import RunConfig, check_layout, load, load_run, save, to_table, write_layout
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.events import read_events
from pipelinerl.observability.logs import table_without_secrets
from pipelinerl.system.files import system_words, write_private

_LOCK: Final = ".lock"
_STARTED: Final = "recipe.started.toml"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run, and its recipe."""

    path: Path
    config: RunConfig

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def started(self) -> Path:
        return self.path / _STARTED

    @property
    def tokens(self) -> Path:
        """The path of this launch's secret: `{"token": …}`."""
        return self.path / "tokens.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this launcher and write a new bearer token; raise `UserError` if it is locked."""
        with held(self.path):
            write_private(self.tokens, json.dumps({"token": secrets.token_urlsafe(32)}))
            yield


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Lock a run's directory for the supervisor of its processes; raise `UserError` if another one has locked it."""
    lock = run_dir / _LOCK
    try:
        # Unlike a plain lock file, the kernel releases this lock when its holder dies.
        acquired = FileLock(lock, timeout=0, mode=0o600, fallback_to_soft=False).acquire()
    except Timeout:
        holder = lock.read_text() or "unknown"
        raise UserError(
            f"{run_dir} is being run by process {holder}; stop that run first, or start another one"
        ) from None
    with acquired:
        lock.write_text(str(os.getpid()))
        yield


def refuse_namesake(config: RunConfig, *, by_hand: Callable[[Path], str]) -> None:
    """Raise `UserError` if a run of this name is live, since a second run on this machine is rarely intended.

    `by_hand(directory)` describes a run in the directory whose services the user started without the launcher; empty if
    there is none.
    """
    directories = (_numbered(config, number).run_directory for number in count(1))
    for path in takewhile(os.path.lexists, directories):
        lock, runner = path / _LOCK, ""
        if lock.is_file():
            try:
                with FileLock(lock, timeout=0, mode=0o600, fallback_to_soft=False):
                    pass
            except Timeout:
                runner = f"process {lock.read_text() or 'unknown'}"
        if runner := runner or by_hand(path):
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

    `claim` reserves the name at other locations that the run writes to; it returns False if another run has the name.
    Raises `UserError` if the directory cannot be made.
    """
    for number in count(1):
        chosen = _numbered(config, number)
        try:
            chosen.run_directory.mkdir(mode=0o755, parents=True, exist_ok=False)
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
                save(chosen, directory.started)
            except OSError as error:
                raise UserError(f"run.directory: {directory.path} cannot be written: {system_words(error)}") from None
            undoing.pop_all()
            return directory
    raise AssertionError("numbers do not end")


def open_run(path: Path) -> RunDirectory:
    """Return the directory of an earlier run; raise `UserError` if it is missing, damaged or of another layout."""
    check_layout(path)
    return RunDirectory(path.resolve(), load_run(path))


_MAY_CHANGE: Final = ""
_DRAWN: Final = "the problems and answers drawn so far follow from it"
_MADE_WITH: Final = "the trainer's state in the checkpoint was made with it"
_STEPS: Final = "the steps taken so far were taken with it"
_ASKED: Final = "accuracies before and after the change could not be compared"

#: The reason why a key of the recipe cannot change on a resumed run, by prefix of the key. The longest matching prefix
#: applies; an empty reason permits the change.
BOUND: Final[Mapping[str, str]] = {
    "run": _MAY_CHANGE,
    "run.name": "it names the run's directory",
    "run.directory": "the run is stored there",
    "run.seed": _DRAWN,
    "model": _MADE_WITH,
    "domains": _DRAWN,
    "domains.*.weight": _MAY_CHANGE,
    "curation": _DRAWN,
    "sampling": _MAY_CHANGE,
    "sampling.group_size": "groups that are issued again keep their size",
    "objective": _STEPS,
    "critic": _MADE_WITH,
    "kl_control": _STEPS,
    "reference": _STEPS,
    "optimizer": _MAY_CHANGE,
    "trainer": _MAY_CHANGE,
    "trainer.type": _MADE_WITH,
    "trainer.precision": _MADE_WITH,
    "trainer.options": _MADE_WITH,
    "trainer.options.mesh": _MAY_CHANGE,
    "trainer.options.gradients": _MAY_CHANGE,
    "trainer.options.experts": _MAY_CHANGE,
    "trainer.options.attention": _MAY_CHANGE,
    "trainer.options.compile": _MAY_CHANGE,
    "trainer.options.distributed": _MAY_CHANGE,
    "trainer.options.optimizer": _MAY_CHANGE,
    "trainer.options.lora.dropout": _MAY_CHANGE,
    "training": _STEPS,
    "training.rollouts_per_step": _MAY_CHANGE,
    "training.no_signal": _MAY_CHANGE,
    "training.deadline_s": _MAY_CHANGE,
    "staleness": _MAY_CHANGE,
    "evaluation": _ASKED,
    "evaluation.interval_steps": _MAY_CHANGE,
    "evaluation.pin": _MAY_CHANGE,
    "evaluation.hold_s": _MAY_CHANGE,
    "evaluations": _ASKED,
    "evaluations.*.interval_steps": _MAY_CHANGE,
    "checkpoint": _MAY_CHANGE,
    "checkpoint.location": "the run's copies are stored there",
    "engine": _MAY_CHANGE,
    "elastic": _MAY_CHANGE,
    "actor": _MAY_CHANGE,
    "verification": _MAY_CHANGE,
    "streams": _MAY_CHANGE,
    "weights": _MAY_CHANGE,
    "parameter_server": _MAY_CHANGE,
    "samples": _MAY_CHANGE,
    "figures": _MAY_CHANGE,
    "trackers": _MAY_CHANGE,
    "launch": _MAY_CHANGE,
}

#: The recipe's key for each knob, a setting that can be changed while a run is live.
_KEY_OF_KNOB: Final[Mapping[str, str]] = {
    "j": "staleness.j",
    "k": "staleness.k",
    "temperature": "sampling.temperature",
    "learning_rate": "optimizer.learning_rate",
    "rollouts_per_step": "training.rollouts_per_step",
    "evaluation_interval_steps": "evaluation.interval_steps",
    "groups_in_flight": "actor.groups_in_flight",
}
_EMPTY: Final = "{}"
_LISTS_BY_NAME: Final = ("domains", "evaluations")


def change_recipe(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the recipe of the run in `run_dir`, as edited since its last launch, with these overrides; write nothing.

    Raises:
        UserError: a key must not change on a resumed run, or was changed while the run was live, or there are overrides
            and the run has several hosts; the message gives the reasons.
    """
    edited, after = load_run(run_dir), load_run(run_dir, overrides)
    members = read_members(run_dir)
    if differences(edited, after) and members is not None and len(members.hosts) > 1:
        raise UserError(
            f"this run is on several hosts, each with a recipe of its own: change {run_dir}/recipe.toml there"
        )
    changed = differences(_started(run_dir), after)
    try:
        events = read_events(run_dir / "events.jsonl")
    except OSError:
        events = []
    live = {name: value for event in events if event["kind"] == "knobs" for name, value in event["changes"].items()}
    keys = {name: key for name, key in _KEY_OF_KNOB.items() if name in live}
    keys |= {f"domain_weights.{name}": f"domains.{name}.weight" for name in live.get("domain_weights") or ()}
    refused = [f"{key} cannot change on a resumed run: {reason}" for key in changed if (reason := _reason(key))]
    refused += [
        f"{key} was changed while the run was live, which takes precedence; set it once the run is live again: "
        f"pipelinerl knobs set {run_dir} {knob}=…"
        for knob, key in keys.items()
        if key in changed
    ]
    if refused:
        raise RecipeError("; ".join(refused) + "; undo the change, or start another run")
    return after


def record_change(run_dir: Path, after: RunConfig, *, step: int) -> list[str]:
    """Write `after` as the run's recipe, with a comment per change at step `step`; return these comments."""
    directory = open_run(run_dir)
    changed = differences(_started(run_dir), after)
    if not changed:
        return []
    with directory.locked():
        made = [f"resumed at step {step}: {key} = {new} (was {old})" for key, (old, new) in changed.items()]
        notes = []
        for line in directory.recipe.read_text().splitlines():
            if not line.startswith("# "):
                break
            notes.append(line.removeprefix("# "))
        save(after, directory.recipe, notes=[*notes, *made])
        save(after, directory.started)
    return made


def _started(run_dir: Path) -> RunConfig:
    """Return the recipe of the last launch; for a run that was begun elsewhere, its recipe.toml."""
    started = run_dir / _STARTED
    return load(started) if started.is_file() else load_run(run_dir)


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ, each with both values as text; `-` for a missing value."""
    old, new = (dict(_flat(table_without_secrets(to_table(each)))) for each in (before, after))
    for one, other in ((old, new), (new, old)):
        for empty in [key for key, value in one.items() if value == _EMPTY]:
            if any(key.startswith(f"{empty}.") for key in other):
                del one[empty]  # the keys inside say what differs
    return {
        key: (old.get(key, "-"), new.get(key, "-"))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "-") != new.get(key, "-")
    }


def _flat(table: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if path in _LISTS_BY_NAME:
        table = {entry["name"]: entry for entry in table}
    if isinstance(table, Mapping) and (table or not path):
        for key, value in table.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, str(table)


def _reason(key: str) -> str:
    """Return why a resumed run must not change this key; empty if it may. Unknown sections must not change."""
    section, _, rest = key.partition(".")
    path = [section, *rest.split(".")] if rest else [section]
    if section in _LISTS_BY_NAME and len(path) > 1:
        path[1] = "*"
    for length in range(len(path), 0, -1):
        if (found := BOUND.get(".".join(path[:length]))) is not None:
            return found
    return _STEPS
