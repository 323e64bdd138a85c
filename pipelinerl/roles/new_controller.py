"""The controller of a run, made from its recipe: settings, problems, and the state of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from ipaddress import ip_address

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.recipe import RunConfig
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.lag import Turns
from pipelinerl.controller.state.run_state import ControllerSettings, RunState
from pipelinerl.enums import NoSignal
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.roles.dtypes import on_accelerator
from pipelinerl.roles.engine_rules import elastic_of
from pipelinerl.roles.problems import held_out_problems, training_problems
from pipelinerl.roles.wiring import knobs_of, objective_of
from pipelinerl.system.cores import usable_cores
from pipelinerl.training.checkpoints.manifest import TrainingState

log = logging.getLogger("pipelinerl")


def build_controller(config: RunConfig, restored: TrainingState | None, *, cores: tuple[int, ...] = ()) -> Controller:
    """Return a run's controller, which continues from a checkpoint if there is one; `cores` as in `settings_of`."""
    training, held_out, knobs = training_problems(config), held_out_problems(config), knobs_of(config)
    for sentence in training.row_counts():
        log.info("%s", sentence)
    state = RunState(knobs=knobs, first_domain_weights=knobs.domain_weights)
    if restored is not None:
        state.resume(restored.controller, step=restored.model_version)
        state.evaluations.follow({each.name: each.place for each in config.evaluation_sets})
    settings = settings_of(config, cores=cores)
    if restored is None or not settings.cores:
        # Turns would be slow on processors that other programs use, and threads that wait for each other most of all.
        is_quiet = bool(settings.cores) and os.getloadavg()[0] < len(settings.cores) / 2
        state.lag.turns = Turns.first() if is_quiet else Turns()
    return Controller(
        settings,
        state,
        training_problem=training.problem,
        held_out_problem=lambda name, index: held_out[name].problem(index),
    )


def overruled(config: RunConfig, knobs: Knobs) -> list[str]:
    """Return a warning for each knob that was changed in the live run and now differs from the recipe's value."""
    recipe = knobs_of(config).to_json()
    return [
        f"{name} is {value}, set while the run was live; the recipe has {recipe[name]}; change it with "
        "`pipelinerl knobs set`"
        for name, value in knobs.to_json().items()
        if value != recipe[name]
    ]


def shared_cores(config: RunConfig, host: str) -> tuple[int, ...]:
    """Return the cores of this machine if all of a run's engines and its trainer may share them in turn; else none.

    `host` is the IP address at which the controller listens: processes of other machines cannot reach loopback.
    """
    devices, cores = (config.engine.device, config.trainer.device), usable_cores()
    is_alone = ip_address(host).is_loopback and len(cores) > 1 and not any(map(on_accelerator, devices))
    return cores if is_alone and config.may_take_turns else ()


def settings_of(config: RunConfig, *, cores: tuple[int, ...] = ()) -> ControllerSettings:
    """Return the settings in the recipe that the controller uses; `cores` are those that may be shared in turn."""
    no_signal = config.training.no_signal or no_signal_of(config.objective)
    filters = no_signal is NoSignal.FILTER or config.curation.filter is not None
    return ControllerSettings(
        run=config.run,
        max_groups=config.streams.max_groups,
        sampling=config.sampling.of_an_order,
        by_domain={domain.name: domain.sampling for domain in config.domains},
        evaluation=plan_of(config, config.evaluation_sets),
        scope=config.staleness.scope,
        overdue=config.staleness.overdue,
        no_signal=no_signal,
        oversample=config.curation.oversample if filters else 1.0,
        lag_loss=(lag_loss := objective_of(config).lag_loss(config.training.old_logprobs)),
        cores=() if lag_loss is None else cores,
        cooldown={domain.name: domain.cooldown or config.curation.cooldown for domain in config.domains},
        elastic=elastic_of(config),
        checkpoint_interval_steps=config.checkpoint.interval_steps,
        engines_expected=config.engine.count,
        save_s=config.launch.save_s,
    )


def plan_of(config: RunConfig, sets: Iterable[EvaluationSet]) -> EvaluationPlan:
    """Return the plan of an evaluation on these sets of problems."""
    section = config.evaluation
    return EvaluationPlan(sets=tuple(each for each in sets if each.problems), pin=section.pin, hold_s=section.hold_s)
