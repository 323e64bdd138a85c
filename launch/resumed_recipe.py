"""The changes that `pipelinerl run --resume RUN section.key=value …` may make to a run's recipe, and their record.

A checkpoint depends on the model, the objective, and the training problems drawn so far. Changes of the keys that
determine these are rejected by name, with the reason; all other keys may change. The changed recipe replaces
`recipe.toml`. The comments at its top say what was changed at which step, and the report shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launch.cluster.membership import read_members
from launch.run_directory import RunDirectory, open_run
from pipelinerl.config.recipe import RunConfig, load_run, save, to_table
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.events import read_events
from pipelinerl.observability.logs import without_secrets

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
    "run.directory": "the run lies there",
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
    "checkpoint.location": "the run's copies lie there",
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
_LISTS_BY_NAME: Final = ("domains", "evaluations")


def change_recipe(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the recipe of the run in `run_dir` with these overrides; write nothing.

    Raises:
        UserError: a change is not allowed on a resumed run, or not on this host; the message gives a reason for each.
    """
    before, after = load_run(run_dir), load_run(run_dir, overrides)
    changed = differences(before, after)
    members = read_members(run_dir)
    if changed and members is not None and len(members.hosts) > 1:
        raise UserError(
            f"this run is on several hosts, each with a recipe of its own: change {run_dir}/recipe.toml there"
        )
    refused = [f"{key} cannot change on a resumed run: {reason}" for key in changed if (reason := _reason(key))]
    refused += [
        f"{key} was changed while the run was live, which takes precedence; set it once the run is live again: "
        f"pipelinerl knobs set {run_dir} {knob}=…"
        for knob, key in _live_knobs(run_dir).items()
        if key in changed
    ]
    if refused:
        raise RecipeError("; ".join(refused) + "; remove it, or start another run")
    return after


def record_change(run_dir: Path, after: RunConfig, *, step: int) -> list[str]:
    """Make `after` the run's recipe from `step` on; return a description of each change.

    Raises:
        UserError: the run is live.
    """
    directory: RunDirectory = open_run(run_dir)
    changed = differences(directory.config, after)
    if not changed:
        return []
    with directory.locked():
        made = [f"resumed at step {step}: {key} = {new} (was {old})" for key, (old, new) in changed.items()]
        save(after, directory.recipe, notes=[*_notes(directory.recipe), *made])
    return made


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ, each with both values as text; `-` for a missing value."""
    old, new = dict(_flat(to_table(before))), dict(_flat(to_table(after)))
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
        yield path, without_secrets(str(table))


def _reason(key: str) -> str:
    """Return why this key must not change on a resumed run; empty if it may. Keys of unknown sections must not
    change.
    """
    section, _, rest = key.partition(".")
    path = [section, *rest.split(".")] if rest else [section]
    if section in _LISTS_BY_NAME and len(path) > 1:
        path[1] = "*"
    for length in range(len(path), 0, -1):
        if (found := BOUND.get(".".join(path[:length]))) is not None:
            return found
    return _STEPS


def _live_knobs(run_dir: Path) -> dict[str, str]:
    """Return the knobs that were changed while the run was live, each with its key in the recipe."""
    try:
        events = read_events(run_dir / "events.jsonl")
    except (OSError, ValueError):
        return {}
    names = {name: value for event in events if event["kind"] == "knobs" for name, value in event["changes"].items()}
    weights = names.get("domain_weights")
    domains = {f"domain_weights.{name}": f"domains.{name}.weight" for name in weights or ()}
    return {name: key for name, key in _KEY_OF_KNOB.items() if name in names} | domains


def _notes(recipe: Path) -> list[str]:
    """Return the comments at the top of the recipe file, which record earlier changes."""
    notes = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("# "):
            break
        notes.append(line.removeprefix("# "))
    return notes
