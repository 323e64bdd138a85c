"""`pipelinerl explain`: an objective's five terms (slots), formula, cost and source, and their value for each token.

Rollouts come from a JSON file or from a stored record of a group (`streams.records`), detected by the first bytes.
The JSON file:

    {"rollouts": [{"reward": 1.0, "group": 0, "judged": true, "tokens": ["so", "4"],
                   "behavior_logprobs": [-0.1, -0.7], "logprobs": [-0.2, -0.5],
                   "old_logprobs": [...], "ref_logprobs": [...], "values": [...]}, …]}

Defaults: `group` is 0, `judged` is true, and `logprobs` are the sampler's. Other columns are needed only by objectives
that read them: `turns`, a list of [tokens, reward] per turn of an episode, by `adv.credit = "turns"`; `parts`, a list
of [name, reward, weight], by `adv = "decoupled"`. All given rollouts form one step's batch. A record or a run's step
(`--run`) holds only the sampler's log-probs; the current policy and recomputed log-probs are assumed equal to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelinerl.commands.findings.learning import mini_batch_finding
from pipelinerl.config import recipe as recipes
from pipelinerl.enums import NoSignal
from pipelinerl.errors import RecordError, UserError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.losses import ScoredRollout
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import no_signal_of, preset_of, resolve, slot_lines
from pipelinerl.objective.reward import PartReward, RewardShaping, TurnReward
from pipelinerl.plugins.replay.recorded_run import RecordedStep, recorded_groups, recorded_step, trained_groups
from pipelinerl.plugins.replay.token_factors import COSTS, EXAMPLE, FIELDS, FORMULA, factors
from pipelinerl.roles.role import Changes, Overrides, joined
from pipelinerl.streams.records import decode_group
from pipelinerl.types import RolloutGroup

#: Metrics that number an optimizer step.
_PLACE: Final = ("epoch", "mini_batch")
_RECORD: Final = b"PLRL"
_PLAIN: Final = RewardShaping()
_COLUMNS: Final = ("behavior_logprobs", "logprobs", "old_logprobs", "ref_logprobs", "values")


def explain(
    choice: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|RECIPE", help="An algorithm or a recipe (default: list the algorithms)."),
    ] = None,
    overrides: Overrides = None,
    changes: Changes = None,
    compare_: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", metavar="A B", help="Two algorithms or recipes; shows what each makes of the same rollouts."
        ),
    ] = None,
    rollout: Annotated[
        list[Path] | None, typer.Option(help="Rollouts (JSON, or a group's record); shows each token's factors.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A finished run; explains rollouts of one of its steps.")] = None,
    step: Annotated[int | None, typer.Option(help="The step of that run.")] = None,
    group: Annotated[int | None, typer.Option(help="Show only the group of this order.")] = None,
) -> None:
    """Print the algorithms, one objective, or a comparison of two."""
    if compare_ is not None and choice is not None:
        raise typer.BadParameter("--compare names both algorithms; leave out the argument")
    if (run is None) != (step is None) or (group is not None and run is None):
        raise typer.BadParameter("--run and --step belong together, and --group to both")
    if rollout and choice is None and compare_ is None:
        raise typer.BadParameter("name an algorithm or a recipe to explain the rollouts with")
    if choice is None and run is None and compare_ is None:
        catalogue(Console())
        return
    of_run = None if run is None or step is None else OfRun(run, step, group)
    if of_run is not None:
        recipes.load_run(of_run.run_dir)  # fail early if the run does not exist
    if compare_ is not None:
        compare(*compare_, rollout or [], Console(), of_run=of_run)
        return
    show(choice or f"{run}/recipe.toml", joined(overrides, changes), rollout or [], Console(), of_run=of_run)


def catalogue(console: Console) -> None:
    """Print the presets, each with its source and the extra forward passes that its inputs need."""
    table = Table("preset", "source", "passes", box=None, pad_edge=False)
    for name, preset in PRESETS.items():
        table.add_row(name, Text(preset.source), ", ".join(sorted(preset.objective.passes)))
    console.print(table)


@dataclass(frozen=True, slots=True)
class OfRun:
    """The rollouts of one step of a run; if `group` (a group's index) is set, only that group's tokens are shown."""

    run_dir: Path
    step: int
    group: int | None = None


def show(
    choice: str, overrides: Sequence[str], files: Sequence[Path], console: Console, *, of_run: OfRun | None = None
) -> None:
    """Print an objective, and its effect on rollouts of `files` or of a run's step. Raises UserError."""
    requested, no_signal, max_tokens, several = _objective_of(choice, overrides)
    name = preset_of(requested)
    objective, preset = resolve(requested, max_tokens=max_tokens), PRESETS[name]
    changed = objective != resolve(name, max_tokens=max_tokens)
    console.print(f"[bold]{name}[/]{' with changes' if changed else ''}: {preset.source}", highlight=False)
    if preset.note:
        console.print(preset.note, highlight=False)
    console.print(f"\n{FORMULA}\n", highlight=False, markup=False)
    slots = Table("slot", "kind", "formula", "reads", box=None, pad_edge=False)
    for line in slot_lines(objective):
        slots.add_row(line.slot, line.kind, Text(line.formula), ", ".join(line.needs))
    console.print(slots)
    passes = [f"{name} ({COSTS[name]})" for name in sorted(objective.passes | objective.needs)]
    console.print("\nneeds " + ("; ".join(passes) or "nothing but the step's own forward and backward pass"))
    console.print(f"groups whose rewards are all equal: {no_signal}")
    if several:
        console.print(f"a batch: {several}", highlight=False)
    if files:
        console.print()
        console.print(_factors(objective, [one for number, file in enumerate(files) for one in read(file, number)]))
    if of_run is not None:
        rollouts, shown, updates = _trained(of_run)
        console.print(f"\nstep {of_run.step} of {of_run.run_dir}; groups are named by their orders", highlight=False)
        console.print(_factors(objective, rollouts, shown=shown))
        if updates is not None:
            console.print(updates)


def compare(first: str, second: str, files: Sequence[Path], console: Console, *, of_run: OfRun | None = None) -> None:
    """Print the terms (slots) in which two objectives differ, and the weight that each gives to every token.

    Each choice is a preset or a recipe. Without `files` or a run, the rollouts are a built-in example.
    """
    rollouts, shown = list(EXAMPLE), None
    if files:
        rollouts = [one for number, file in enumerate(files) for one in read(file, number)]
    elif of_run is not None:
        rollouts, shown, _ = _trained(of_run)
    most = max(len(one.tokens) for one in rollouts)
    pair = []
    for choice in (first, second):
        requested, _, max_tokens, _ = _objective_of(choice, [])
        pair.append(resolve(requested, max_tokens=max_tokens or most))
        console.print(f"[bold]{choice}[/]: {PRESETS[preset_of(requested)].source}", highlight=False)
    console.print(f"\n{FORMULA}\n", highlight=False, markup=False)
    slots = Table("slot", first, second, box=None, pad_edge=False)
    same = []
    for ours, theirs in zip(*map(slot_lines, pair), strict=True):
        if ours.kind == theirs.kind:
            same.append(ours.slot)
        else:
            slots.add_row(ours.slot, Text(ours.formula), Text(theirs.formula))
    console.print(slots)
    console.print(f"equal: {', '.join(same) or 'no slot'}\n", highlight=False)
    rows = [factors(each, rollouts) for each in pair]
    table = Table(box=None, pad_edge=False)
    for name in ("group", "rollout", "reward", "t", "token", "π_θ/μ", "advantage", "weight", "M", "gradient"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for row, other in zip(*rows, strict=True):
        one = rollouts[row.rollout]
        if shown is not None and one.group not in shown:
            continue
        ratio = math.exp(one.logprobs[row.position] - one.behavior_logprobs[row.position])
        table.add_row(
            str(one.group),
            str(row.rollout),
            f"{one.reward:g}",
            str(row.position),
            Text(repr(row.token)),
            f"{ratio:.3g}",
            f"{row.adv + 0.0:+.3f} | {other.adv + 0.0:+.3f}",
            f"{row.agg * row.is_weight:.4f} | {other.agg * other.is_weight:.4f}",
            f"{row.kept:d} | {other.kept:d}",
            f"{row.multiplier + 0.0:+.4f} | {other.multiplier + 0.0:+.4f}",
        )
    console.print(table)
    console.print(
        f"each column: {first} | {second}. weight is agg · is_weight; M is 0 where clipping removes the gradient; "
        "gradient is dJ / d log π_θ of the token.",
        highlight=False,
    )
    ours, theirs = ([row.multiplier for row in each] for each in rows)
    sizes = math.hypot(*ours) * math.hypot(*theirs)
    product = sum(one * other for one, other in zip(ours, theirs, strict=True))
    cosine = f"{product / sizes:.3f}" if sizes else "undefined, since a gradient is 0"
    console.print(
        f"of {len(ours)} tokens {first} trains {sum(map(bool, ours))}, {second} trains {sum(map(bool, theirs))}; "
        f"cosine of the two gradients: {cosine}",
        highlight=False,
    )


def read(path: Path, group: int = 0) -> list[ScoredRollout]:
    """Read rollouts from a JSON file or a stored record; those without a group number get `group`. Raises UserError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if content.startswith(_RECORD):
        try:
            return _scored(decode_group(content), group, str)
        except RecordError as error:
            raise UserError(f"{path}: {error}") from None
    try:
        table = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is neither a record of a group nor JSON: {error}") from None
    entries = table.get("rollouts") if isinstance(table, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f'{path} must hold {{"rollouts": […]}} with at least one rollout')
    return [_of_json(entry, f"{path}: rollouts.{number}", group) for number, entry in enumerate(entries)]


def _objective_of(
    choice: str, overrides: Sequence[str]
) -> tuple[str | dict[str, Any], NoSignal, int | None, str | None]:
    """Return an objective for `resolve`, and the recipe's treatment of equal rewards, max_tokens and mini-batches."""
    if choice in PRESETS:
        if overrides:
            raise UserError(f"{choice} is a preset, and {overrides[0]} changes a recipe; name a recipe instead")
        return choice, no_signal_of(choice), None, None
    shipped = sorted(path.stem for path in recipes.RECIPES.glob("*.toml"))
    if choice not in shipped and not Path(choice).is_file():
        raise UserError(
            f"{choice!r} is neither a preset nor a recipe; presets are {', '.join(PRESETS)}; a recipe is a file, or "
            f"one of {', '.join(shipped)}"
        )
    config = recipes.load(choice, overrides)
    no_signal = config.training.no_signal or no_signal_of(config.objective)
    return config.objective, no_signal, config.sampling.max_tokens, mini_batch_finding(config)


def _factors(
    objective: PolicyObjective, rollouts: Sequence[ScoredRollout], *, shown: Collection[int] | None = None
) -> Table:
    """Return a table of the terms for each token of the groups in `shown` (default: all); rollouts form one batch."""
    table = Table(box=None, pad_edge=False)
    for name in ("group", "rollout", "t", "token", "agg", "is_weight", "adv", "M", "multiplier"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for row in factors(objective, rollouts):
        group = rollouts[row.rollout].group
        if shown is not None and group not in shown:
            continue
        table.add_row(
            str(group),
            str(row.rollout),
            str(row.position),
            Text(repr(row.token)),
            f"{row.agg:.4g}",
            f"{row.is_weight:.4g}" + (" cut" if row.truncated else ""),
            f"{row.adv:.4g}",
            "1" if row.kept else "0",
            f"{row.multiplier + 0.0:+.4g}",  # adding 0.0 turns −0.0 into 0.0, so no minus sign is printed
        )
    return table


def _trained(of_run: OfRun) -> tuple[list[ScoredRollout], list[int] | None, Table | None]:
    """Return a step's rollouts, the groups to show (None: all), and a table of its optimizer steps, if several."""
    config = recipes.load_run(of_run.run_dir)
    step = recorded_step(of_run.run_dir, of_run.step)
    if of_run.group is not None and of_run.group not in step.orders:
        raise UserError(
            f"step {step.version} of {of_run.run_dir} did not train on the group of order {of_run.group}; its orders "
            f"are {', '.join(map(str, step.orders))}"
        )
    try:
        groups = trained_groups(step, recorded_groups(config, of_run.run_dir))
    except RecordError as error:
        raise UserError(str(error)) from None
    tokenizer = ChatTokenizer.load(config.model.resolved)
    shaping = {domain.name: domain.shaping or _PLAIN for domain in config.domains}
    rollouts = [
        one
        for each in groups
        for one in _scored(each, each.index, lambda token: tokenizer.decode([token]), shaping.get(each.domain, _PLAIN))
    ]
    return rollouts, None if of_run.group is None else [of_run.group], update_table(step)


def _scored(
    stored: RolloutGroup, group: int, text_of: Callable[[int], str], shaping: RewardShaping = _PLAIN
) -> list[ScoredRollout]:
    rollouts = []
    for one in stored.rollouts:
        logprobs = tuple(float(value) for turn in one.turns for value in turn.behavior_logprobs)
        rollouts.append(
            ScoredRollout(
                tokens=tuple(text_of(token) for turn in one.turns for token in turn.token_ids.tolist()),
                reward=one.verdict.reward,
                group=group,
                judged=one.verdict.outcome.is_judgement,
                behavior_logprobs=logprobs,
                logprobs=logprobs,
                old_logprobs=logprobs,
                turns=tuple(TurnReward(len(turn.token_ids), turn.reward, turn.agent) for turn in one.turns),
                parts=shaping.parts(one.verdict.parts),
            )
        )
    return rollouts


def _of_json(entry: Any, path: str, group: int) -> ScoredRollout:
    if not isinstance(entry, dict):
        raise UserError(f"{path} must be an object, got {entry!r}")
    unknown = [name for name in entry if name not in FIELDS]
    if unknown:
        raise UserError(f"{path}.{unknown[0]} is unknown; expected any of {', '.join(FIELDS)}")
    if not isinstance(entry.get("reward"), int | float) or isinstance(entry["reward"], bool):
        raise UserError(f"{path}.reward must be a number, got {entry.get('reward')!r}")
    tokens, judged, own = entry.get("tokens"), entry.get("judged", True), entry.get("group", group)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path}.tokens must be a list of text, got {tokens!r}")
    if not isinstance(judged, bool):
        raise UserError(f"{path}.judged must be true or false, got {judged!r}")
    if not isinstance(own, int) or isinstance(own, bool):
        raise UserError(f"{path}.group must be a whole number, got {own!r}")
    turns = _converted(entry, "turns", "[tokens, reward]", path, TurnReward)
    lengths = [turn.num_tokens for turn in turns]
    if turns and (min(lengths) < 0 or sum(lengths) != len(tokens)):
        raise UserError(
            f"{path}.turns must have {len(tokens)} tokens together, as many as the rollout, got {entry['turns']!r}"
        )
    columns = {name: _numbers(entry, name, path) for name in _COLUMNS}
    if columns["behavior_logprobs"] is None:
        raise UserError(f"{path}.behavior_logprobs must be given, one per token")
    return ScoredRollout(
        tokens=tuple(tokens),
        reward=float(entry["reward"]),
        group=own,
        judged=judged,
        behavior_logprobs=columns["behavior_logprobs"],
        logprobs=columns["logprobs"] or columns["behavior_logprobs"],
        old_logprobs=columns["old_logprobs"],
        ref_logprobs=columns["ref_logprobs"],
        values=columns["values"],
        turns=turns,
        parts=_converted(entry, "parts", "[name, reward, weight]", path, PartReward),
    )


T = TypeVar("T")


def _converted(entry: Mapping[str, Any], name: str, form: str, path: str, kind: type[T]) -> tuple[T, ...]:
    try:
        return msgspec.convert(entry.get(name, []), tuple[kind, ...])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise UserError(f"{path}.{name} must be a list of {form}: {error}") from None


def _numbers(entry: Mapping[str, Any], name: str, path: str) -> tuple[float, ...] | None:
    column = entry.get(name)
    if column is None:
        return None
    if not isinstance(column, list) or not all(type(value) in (int, float) for value in column):
        raise UserError(f"{path}.{name} must be a list of numbers, got {column!r}")
    return tuple(float(value) for value in column)


def update_table(step: RecordedStep) -> Table | None:
    """Return a table of a training step's metrics with a row per optimizer step; None if there was only one."""
    if not step.updates:
        return None
    names = [name for name in step.updates[0] if name not in _PLACE]
    table = Table(*_PLACE, *names, title=f"optimizer steps of step {step.version}", box=None, pad_edge=False)
    for update in step.updates:
        place = [f"{update[name]:.0f}" for name in _PLACE]
        table.add_row(*place, *(f"{update[name]:.4g}" if name in update else "" for name in names))
    return table
