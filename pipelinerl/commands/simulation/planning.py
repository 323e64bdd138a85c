"""Trials of a recipe on given hardware, and the accuracy of the model against measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from pipelinerl.commands.simulation.from_recipe import observed, setting_of
from pipelinerl.commands.simulation.hardware_table import parse_lengths, read_table
from pipelinerl.config.recipe import load
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.events import Event
from pipelinerl.simulation.calibration import ObservedRun, calibrate
from pipelinerl.simulation.hardware import Hardware
from pipelinerl.simulation.lengths import LengthLaw
from pipelinerl.simulation.measured import TRUSTED, measure, simulated_like
from pipelinerl.simulation.simulator import simulate
from pipelinerl.simulation.sweep import Trial

#: Default number of steps of a simulated run.
STEPS: Final = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Inputs of predictions. `checks`: simulated ÷ measured − 1 of some figures, by the measured run."""

    hardware: Hardware
    lengths: LengthLaw | None
    length_words: str
    prompt_tokens: int
    filtered: float = 0.0
    checks: Mapping[str, Mapping[str, float]]

    @property
    def worst(self) -> float:
        """The largest error, as a share; 0 without measurements."""
        return max((abs(error) for errors in self.checks.values() for error in errors.values()), default=0.0)

    @property
    def verdict(self) -> str:
        """A sentence on how far predictions can be trusted."""
        if not self.checks:
            return "Nothing was measured here: the figures are as good as the hardware table."
        if self.worst <= TRUSTED:
            return f"The model is within {self.worst:.0%} of what was measured."
        return (
            f"NOT TO BE TRUSTED: the model is {self.worst:.0%} off what was measured, at most {TRUSTED:.0%} may be; "
            "measure on a quieter machine, or longer, or give a synchronous run first and an asynchronous one beside it"
        )


def basis_of_runs(run_dirs: Sequence[Path]) -> Basis:
    """Calibrate from finished runs.

    The second half of the first run is predicted from its first half; each run is predicted from all runs.

    Raises:
        UserError: one of them is no run, or too short.
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
        length_words="",
        prompt_tokens=setting.prompt_tokens,
        filtered=setting.filtered,
        checks=checks,
    )


def basis_of_table(path: Path) -> Basis:
    """Return the basis of a hardware table."""
    table = read_table(path)
    return Basis(
        hardware=table.hardware, lengths=None, length_words=table.lengths, prompt_tokens=table.prompt_tokens, checks={}
    )


def halves(run: ObservedRun) -> tuple[ObservedRun, ObservedRun]:
    """Split a run in two at its middle step."""
    steps = [number for number, event in enumerate(run.events) if event["kind"] == "step"]
    if not steps:
        raise UserError("the run has taken no steps: there is nothing to calibrate from")
    middle = steps[len(steps) // 2]
    parts: tuple[list[Event], list[Event]] = (list(run.events[: middle + 1]), list(run.events[middle + 1 :]))
    return ObservedRun(events=parts[0], setting=run.setting), ObservedRun(events=parts[1], setting=run.setting)


def tried(recipe: str, overrides: Sequence[str], changes: tuple[str, ...], basis: Basis, *, steps: int) -> Trial:
    """Simulate the recipe with these changes; an invalid combination returns a trial with the reason.

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
            config, lengths=lengths, prompt_tokens=basis.prompt_tokens, filtered=basis.filtered, steps=steps
        )
        return Trial(changes=changes, engines=setting.engines, prediction=simulate(setting, basis.hardware))
    except (RecipeError, ValueError) as error:
        if not changes:
            raise
        return Trial(changes=changes, refusal=str(error))
