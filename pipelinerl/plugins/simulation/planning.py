"""`pipelinerl simulate`: simulates a recipe on given hardware, and measures the accuracy against finished runs."""

from __future__ import annotations

import json as json_text
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import msgspec
import typer

from pipelinerl.config.recipe import load
from pipelinerl.controller.state.lag import USUAL_COST
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.charts import Chart, Line, Mark, svg
from pipelinerl.observability.run_history import Series
from pipelinerl.plugins.simulation.calibration import TRUSTED, ObservedRun, calibrate, measure, simulated_like
from pipelinerl.plugins.simulation.from_recipe import observed, setting_of
from pipelinerl.plugins.simulation.hardware import Hardware
from pipelinerl.plugins.simulation.prediction import Trial, grid, recommended
from pipelinerl.plugins.simulation.published import (
    ACCELERATORS,
    BANDWIDTH_SHARE,
    PublishedHardware,
    mean_context,
    published_hardware,
)
from pipelinerl.plugins.simulation.setting import FixedLengths, HeavyTailedLengths, LengthLaw
from pipelinerl.plugins.simulation.simulator import simulate
from pipelinerl.roles.role import Changes, Overrides, Recipe, joined

#: Default number of steps of a simulated run.
STEPS: Final = 100
#: The sections of a hardware table, and the class of each.
_SECTIONS: Final[Mapping[str, type[Any]]] = get_type_hints(Hardware)


def simulate_command(
    recipe: Recipe,
    overrides: Overrides = None,
    changes: Changes = None,
    from_runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="A finished, ideally synchronous run to calibrate from; a second one for contention."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="A hardware table instead of a run: a file, or h100, h200 or v5p with a model size (h100:7b), "
            "computed from published figures. Sizes: 0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="section.key=value,value,…; several are combined.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Distribution of answer lengths: fixed:TOKENS or heavy:MEDIAN,SIGMA.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each simulated run.")] = 100,
    engine_hour: Annotated[float | None, typer.Option(min=0, help="Price of an engine per hour.")] = None,
    trainer_hour: Annotated[float | None, typer.Option(min=0, help="Price of the trainer per hour.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Simulate the recipe, once for each combination of swept values; exit status 2 if all are refused."""
    if bool(from_runs) == (hardware is not None):
        raise UserError(
            "timings are required: give either --from RUN (a finished run) or --hardware (a file, or such as h100:7b)"
        )
    basis = basis_of_runs(from_runs) if from_runs else basis_of_table(hardware or "")
    prices = replace(
        basis.hardware.prices,
        **{k: v for k, v in (("engine_hour", engine_hour), ("trainer_hour", trainer_hour)) if v is not None},
    )
    basis = replace(basis, hardware=replace(basis.hardware, prices=prices), length_words=lengths or basis.length_words)
    made = joined(overrides, changes)
    trials = [tried(recipe, made, swept, basis, steps=steps) for swept in grid(sweep or [])]
    best = recommended(trials) if sweep else None
    notes = [basis.verdict, *([f"recommended: {' '.join(best.changes)}"] if best is not None else [])]
    if html is not None:
        html.write_text(page_of(f"{recipe}, simulated", trials, notes))
    if json:
        typer.echo(json_text.dumps(json_of(trials, best=best, checks=basis.checks) | {"verdict": basis.verdict}))
        return
    for line in lines_of(trials):
        typer.echo(line)
    for run, errors in basis.checks.items():
        listed = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        typer.echo(f"simulated against measured, {run}: {listed}")
    for note in notes:
        typer.echo(note)
    if html is not None:
        typer.echo(str(html))
    if all(trial.refusal for trial in trials):
        raise typer.Exit(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Inputs of predictions. `checks` holds the simulator's errors (simulated ÷ measured − 1) by run and metric."""

    hardware: Hardware | PublishedHardware
    lengths: LengthLaw | None = None
    length_words: str = ""
    """Lengths of answers in the format of `--lengths`, or empty; if given, `lengths` is ignored."""
    prompt_tokens: int = 0
    filtered: float = 0.0
    lag_cost: float | None = None
    """c, as the last step of a run estimated it; None if no run was given."""
    checks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest relative error in `checks`, in absolute value; 0 without measured runs."""
        return max((abs(error) for errors in self.checks.values() for error in errors.values()), default=0.0)

    @property
    def verdict(self) -> str:
        """A sentence on how far predictions can be trusted."""
        if isinstance(self.hardware, PublishedHardware):
            return (
                f"Published figures, not measured here: {self.hardware.accelerator.source}. "
                f"Assumed: transfers at {BANDWIDTH_SHARE:.0%} of peak, training at "
                f"{self.hardware.accelerator.utilisation:.0%}."
            )
        if not self.checks:
            return "Nothing was measured: the figures are only as good as the hardware table."
        if self.worst <= TRUSTED:
            return f"The model is within {self.worst:.0%} of the measurements."
        return (
            f"NOT TO BE TRUSTED: the model is {self.worst:.0%} off the measurements, more than {TRUSTED:.0%}; "
            "measure on a quieter machine, or longer, or give a synchronous run first and an asynchronous one second"
        )


def basis_of_runs(run_dirs: Sequence[Path]) -> Basis:
    """Calibrate the simulator with finished runs.

    The simulator's accuracy is measured in two ways: calibrated with the first half of the first run, it predicts the
    second half; calibrated with all runs, it predicts each of them.

    Raises:
        UserError: a directory is no run, or the run is too short.
    """
    runs = [observed(run_dir) for run_dir in run_dirs]
    hardware = calibrate(runs)
    checks: dict[str, Mapping[str, float]] = {}
    first, second = halves(runs[0])
    held_back = simulate(replace(second.setting, steps=STEPS), calibrate([first]))
    checks[f"{run_dirs[0]}, second half from the first"] = measure(second.events).errors(held_back)
    for run_dir, run in zip(run_dirs, runs, strict=True):
        checks[str(run_dir)] = measure(run.events).errors(simulated_like(run.events, run.setting, hardware))
    setting = runs[0].setting
    return Basis(
        hardware=hardware,
        lengths=setting.lengths,
        prompt_tokens=setting.prompt_tokens,
        filtered=setting.filtered,
        lag_cost=setting.lag_cost,
        checks=checks,
    )


def basis_of_table(table_name: str) -> Basis:
    """Return the inputs of predictions from a hardware table (a file or a published one), or raise `UserError`."""
    path = Path(table_name)
    if not path.exists() and (":" in table_name or table_name in ACCELERATORS):
        return Basis(hardware=published_hardware(table_name))
    return _read_table(path)


def halves(run: ObservedRun) -> tuple[ObservedRun, ObservedRun]:
    """Split a run in two at its middle step; raise `UserError` if it has no steps."""
    steps = [number for number, event in enumerate(run.events) if event["kind"] == "step"]
    if not steps:
        raise UserError("the run has taken no steps: there is nothing to calibrate from")
    end = steps[len(steps) // 2] + 1
    return replace(run, events=run.events[:end]), replace(run, events=run.events[end:])


def tried(recipe: str, overrides: Sequence[str], changes: tuple[str, ...], basis: Basis, *, steps: int) -> Trial:
    """Simulate the recipe with these changes; for invalid changes, the trial has a reason and no prediction.

    Raises:
        UserError: the lengths of answers are unknown.
    """
    try:
        config = load(recipe, [*overrides, *changes])
        lengths = basis.lengths
        if basis.length_words:
            lengths = parse_lengths(basis.length_words, most=config.sampling.max_tokens)
        if lengths is None:
            raise UserError("the lengths of answers are not known: give --lengths, such as --lengths heavy:400,0.9")
        setting = setting_of(
            config,
            lengths=lengths,
            prompt_tokens=basis.prompt_tokens,
            filtered=basis.filtered,
            lag_cost=USUAL_COST if basis.lag_cost is None else basis.lag_cost,
            steps=steps,
        )
        hardware = basis.hardware
        if isinstance(hardware, PublishedHardware):
            hardware = hardware.times(
                engine_devices=config.engine.devices,
                trainer_devices=max(1, config.gpus_of_trainer),
                rows=setting.slots,
                context=mean_context(lengths, setting.prompt_tokens),
            )
        return Trial(changes=changes, engines=setting.engines, prediction=simulate(setting, hardware))
    except (RecipeError, ValueError) as error:
        if not changes:
            raise
        return Trial(changes=changes, refusal=str(error))


# --- hardware tables: TOML files with the time of each operation (docs/understand/simulation.md shows every key) ---


def _read_table(path: Path) -> Basis:
    """Read a hardware table; raise `UserError` if the file is unreadable or has an unknown key or invalid value."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the hardware table {path} cannot be read: {error}") from None
    answers = table.pop("answers", {})
    if unknown := sorted(set(table) - set(_SECTIONS)):
        raise UserError(f"{path}: unknown section {unknown[0]}; known are {', '.join((*_SECTIONS, 'answers'))}")
    if missing := [name for name in ("engine", "trainer") if name not in table]:
        raise UserError(f"{path}: the section {missing[0]} must be given")
    sections = {}
    for name, values in table.items():
        known = [each.name for each in fields(_SECTIONS[name])]
        if not isinstance(values, dict) or set(values) - set(known):
            raise UserError(f"{path}: {name} must be a table with {', '.join(known)} only, got {values!r}")
        if negative := [key for key, value in values.items() if isinstance(value, int | float) and value < 0]:
            raise UserError(f"{path}: {name}.{negative[0]} must not be negative, got {values[negative[0]]!r}")
        try:
            sections[name] = msgspec.convert(values, _SECTIONS[name])
        except msgspec.ValidationError as error:
            raise UserError(f"{path}: {name}: {error}") from None
    lengths, prompt_tokens = answers.get("lengths", ""), answers.get("prompt_tokens", 0)
    typed = isinstance(lengths, str) and isinstance(prompt_tokens, int)
    if not typed or set(answers) - {"lengths", "prompt_tokens"}:
        raise UserError(
            f"{path}: answers may hold only lengths (text, as --lengths) and prompt_tokens (a whole number)"
        )
    return Basis(hardware=Hardware(**sections), length_words=lengths, prompt_tokens=prompt_tokens)


def parse_lengths(text: str, *, most: int) -> LengthLaw:
    """Parse `fixed:TOKENS` or `heavy:MEDIAN,SIGMA`, truncated at `most` tokens; raise `UserError` for other text."""
    kind, _, numbers = text.partition(":")
    try:
        match kind, [float(number) for number in numbers.split(",")]:
            case "fixed", [tokens] if tokens >= 1:
                return FixedLengths(min(int(tokens), most))
            case "heavy", [median, sigma] if median > 0 and sigma >= 0:
                return HeavyTailedLengths(median, sigma, most)
    except ValueError:
        pass
    raise UserError(f"lengths must be fixed:TOKENS or heavy:MEDIAN,SIGMA, such as heavy:400,0.9; got {text!r}")


#: Heading, attribute of `Prediction`, and number format of each column of the output.
_COLUMNS: Final = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("rollouts/s", "rollouts_per_s", ",.1f"),
    ("steps/h", "steps_per_hour", ",.0f"),
    ("step", "step_s", ",.3g"),
    ("trainer waits", "trainer_wait", ".0%"),
    ("held by updates", "trainer_held", ".0%"),
    ("engines idle", "engine_idle", ".0%"),
    ("rows", "rows", ",.0f"),
    ("staleness", "staleness_mean", ".1f"),
    ("discarded", "discarded", ".1%"),
    ("steps in flight", "ahead", ".1f"),
    ("j", "j", "d"),
    ("a step teaches", "learning", ".0%"),
)
_COST: Final = (("per hour", "cost_per_hour", ",.2f"), ("per 10⁶ tokens", "cost_per_million_tokens", ",.3g"))
_STYLE: Final = """
:root { --ink:#171b22; --soft:#5c6675; --grid:#e6e9ee; --base:#c3c9d2; --card:#fff; --s1:#2a78d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e8ebf0; --soft:#97a1b0; --grid:#272e38; --base:#444d5a; --card:#181d24; --s1:#5aa2f2; }
}
body { margin:0 auto; max-width:1080px; padding:24px; background:var(--card); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr)); gap:14px; }
figure { margin:0; } figcaption { font-weight:600; font-size:13.5px; }
svg { width:100%; height:auto; } svg .c1 { --c:var(--s1); } svg path { fill:none; stroke:var(--c); stroke-width:2; }
svg .dot { fill:var(--c); } svg .grid { stroke:var(--grid); } svg .base { stroke:var(--base); }
svg .tick { fill:var(--soft); font-size:11px; }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; font-size:14px; }
th,td { text-align:right; padding:4px 14px 4px 0; } th { color:var(--soft); font-weight:500; }
th:first-child,td:first-child { text-align:left; }
"""


def lines_of(trials: Sequence[Trial]) -> list[str]:
    """Return a heading and a line per trial; the line of an invalid trial states the reason."""
    columns = _columns(trials)
    headings = ["", *(heading for heading, *_ in columns)]
    rows = [headings, *([_name(trial), *_cells(trial, columns)] for trial in trials if trial.prediction)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return [*lines, *(f"{_name(trial)}: {trial.refusal}" for trial in trials if trial.prediction is None)]


def json_of(
    trials: Sequence[Trial], *, best: Trial | None, checks: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return the trials (changes and predicted metrics), the best trial's changes and the `checks` as JSON values."""
    return {
        "trials": [
            {
                "changes": list(trial.changes),
                "engines": trial.engines,
                "refusal": trial.refusal,
                "prediction": msgspec.to_builtins(trial.prediction, str_keys=True),
            }
            for trial in trials
        ],
        "recommended": None if best is None else list(best.changes),
        "checks": checks,
    }


def page_of(title: str, trials: Sequence[Trial], notes: Sequence[str]) -> str:
    """Return a self-contained HTML page: notes, a table, a plot of each metric over the trials, and rollout ages."""
    ran = [trial for trial in trials if trial.prediction is not None]
    charts = []
    for heading, attribute, form in _COLUMNS:
        values = tuple(float(getattr(trial.prediction, attribute)) for trial in ran)
        series = Series(tuple(float(number) for number in range(1, len(values) + 1)), values)
        charts.append(_dots(heading, series, "trial", percent=form.endswith("%")))
    for trial in ran:
        ages = {} if trial.prediction is None else trial.prediction.staleness
        series = Series(tuple(map(float, ages)), tuple(ages.values()))
        charts.append(_dots(f"Age of trained rollouts: {_name(trial)}", series, "versions", percent=True))
    figures = (f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(chart)}</figure>" for chart in charts)
    columns = _columns(trials)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ("changed", *(heading for heading, *_ in columns)))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (_name(trial), *_cells(trial, columns))) + "</tr>"
        for trial in trials
    )
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    numbered = "; ".join(f"{number}: {_name(trial)}" for number, trial in enumerate(ran, start=1))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{paragraphs}<table><tr>{head}</tr>{rows}</table>"
        f'<p>Trials: {escape(numbered)}</p><div class="charts">{"".join(figures)}</div></html>\n'
    )


def _columns(trials: Sequence[Trial]) -> tuple[tuple[str, str, str], ...]:
    """Return the columns of the output; costs are left out if no trial has prices."""
    has_prices = any(trial.prediction is not None and trial.prediction.cost_per_hour for trial in trials)
    return (*_COLUMNS, *_COST) if has_prices else _COLUMNS


def _cells(trial: Trial, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    if trial.prediction is None:
        return [trial.refusal, *[""] * (len(columns) - 1)]
    return [format(getattr(trial.prediction, attribute), form) for _, attribute, form in columns]


def _name(trial: Trial) -> str:
    return " ".join(trial.changes) or "the unchanged recipe"


def _dots(title: str, series: Series, x_label: str, *, percent: bool) -> Chart:
    return Chart(title=title, lines=(Line(series=series, mark=Mark.DOTS),), x_label=x_label, percent=percent)
