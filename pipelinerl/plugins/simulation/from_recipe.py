"""Conversion of a recipe to a `SimulatedSetting`, and of a finished run's directory to an `ObservedRun`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from pipelinerl.config.recipe import RunConfig, load_run
from pipelinerl.controller.state.run_state import OVERSAMPLED
from pipelinerl.enums import NoSignal, Overdue, StalenessScope
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.samples import SampleKind, read_samples
from pipelinerl.plugins.simulation.calibration import ObservedRun
from pipelinerl.plugins.simulation.setting import LengthLaw, ObservedLengths, SimulatedSetting
from pipelinerl.roles.wiring import objective_of
from pipelinerl.staleness import MODES

#: Maximum number of recorded answers whose lengths form the distribution of answer lengths.
_MOST_LENGTHS: Final = 20_000


def setting_of(
    config: RunConfig,
    *,
    lengths: LengthLaw,
    prompt_tokens: int,
    filtered: float = 0.0,
    lag_cost: float | None = None,
    steps: int | None = None,
) -> SimulatedSetting:
    """Return the settings of a recipe on which the timing of the simulated run depends.

    Raises:
        RecipeError: the recipe has a setting that the simulator does not support.
    """
    _refuse_unknown(config)
    bounds, auto_j = config.staleness.bounds, config.staleness.auto_j
    if auto_j and objective_of(config).lag_loss(config.training.old_logprobs) is None:
        bounds, auto_j = MODES["on_policy"], False
    no_signal = config.training.no_signal or no_signal_of(config.objective)
    drops = no_signal is NoSignal.FILTER or config.curation.filter is not None
    oversample = config.curation.oversample or (OVERSAMPLED if bounds.k > bounds.j else 1.0)
    return SimulatedSetting(
        steps=config.run.steps if steps is None else steps,
        engines=config.engine.count,
        slots=config.engine.slots,
        bounds=bounds,
        on_update=config.engine.on_update,
        rollouts_per_step=config.training.rollouts_per_step,
        group_size=config.sampling.group_size,
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        epochs=config.training.epochs,
        mini_batches=config.training.mini_batches,
        actors=config.actor.count,
        groups_in_flight=config.groups_in_flight,
        attempts=config.actor.attempts,
        max_groups=config.streams.max_groups,
        oversample=oversample if drops else 1.0,
        filtered=filtered if drops else 0.0,
        seed=config.run.seed,
        auto_j=auto_j,
        lag_cost=lag_cost,
    )


def observed(run_dir: Path, changes: Sequence[str] = ()) -> ObservedRun:
    """Return the records of a finished run, with the lengths of its answers; raise `UserError` if some are missing."""
    try:
        config, events = load_run(run_dir, changes), read_events(run_dir / "events.jsonl")
    except (OSError, UserError) as error:
        raise UserError(f"{run_dir} cannot be used for calibration: {error}") from None
    groups = (group for group in read_samples(run_dir) if group.kind is SampleKind.TRAINED)
    lengths = tuple(islice((answer.length for group in groups for answer in group.answers), _MOST_LENGTHS))
    if not lengths:
        raise UserError(f"{run_dir} has no samples of trained answers, whose lengths are needed; give --lengths")
    history = tell(events)
    try:
        prompts = sum(float(step["tokens"]) - float(step["sampled_tokens"]) for step in history.steps)
        prompt_tokens = round(prompts / sum(float(step["rollouts"]) for step in history.steps))
    except (KeyError, ZeroDivisionError):
        raise UserError(f"{run_dir} has no step that records the tokens it trained on") from None
    ledger = (history.finished or {}).get("ledger") or {}  # an unfinished run has no totals yet
    trained, filtered = float(ledger.get("trained", 0)), float(ledger.get("filtered", 0))
    setting = setting_of(
        config,
        lengths=ObservedLengths(lengths),
        prompt_tokens=prompt_tokens,
        filtered=filtered / (trained + filtered) if filtered else 0.0,
        lag_cost=next((float(step["lag_cost"]) for step in reversed(history.steps) if "lag_cost" in step), None),
    )
    return ObservedRun(events=events, setting=setting, threads=config.launch.threads)


def _refuse_unknown(config: RunConfig) -> None:
    sizes = {config.group_size_of(domain) for domain in config.trained_domains}
    for is_unknown, what in (
        (config.staleness.overdue is not Overdue.DROP, 'staleness.overdue = "wait"'),
        (config.staleness.scope is not StalenessScope.GROUP, 'staleness.scope = "rollout"'),
        (config.training.tokens_per_step is not None, "training.tokens_per_step"),
        (sizes != {config.sampling.group_size}, "a domain's own group_size"),
    ):
        if is_unknown:
            raise RecipeError(
                f"{what} is not simulated (docs/understand/simulation.md says what is); leave it out to simulate"
            )
