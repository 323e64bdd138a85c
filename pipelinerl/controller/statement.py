"""`run_status`: the controller's state as the `RunStatus` that `/status`, the progress bar and the CLI show."""

from __future__ import annotations

from pipelinerl.controller.controller import Controller, Phase
from pipelinerl.controller.fleet import EngineRecord, Standing
from pipelinerl.observability import status


def run_status(controller: Controller, *, name: str, now: float, elapsed_s: float) -> status.RunStatus:
    """A snapshot for people; `now` is on the controller's monotonic clock."""
    results = controller.results
    last = results[-1] if results else None
    step = controller.last_step
    publish = controller.last_publish
    records = controller.fleet.records()
    healthy = [record for record in records if record.standing is Standing.HEALTHY]
    step_seconds = step.get("step_s", 0.0) + step.get("wait_s", 0.0)
    remaining = controller.settings.steps - controller.version
    done = controller.version - controller.first_version
    return status.RunStatus(
        run=name,
        phase=_phase(controller),
        step=controller.version,
        total_steps=controller.settings.steps,
        model_version=controller.version,
        epoch=controller.epoch,
        reward=step.get("reward"),
        held_out_accuracy=last.accuracy if last else None,
        held_out_low=last.low if last else None,
        held_out_high=last.high if last else None,
        first_accuracy=results[0].accuracy if results else None,
        best_accuracy=max((result.accuracy for result in results), default=None),
        tokens_per_s=sum(record.tokens_per_s for record in records),
        rollouts_per_s=step.get("rollouts", 0.0) / step_seconds if step_seconds else 0.0,
        staleness_mean=step.get("staleness_mean", 0.0),
        staleness_max=int(step.get("staleness_max", 0)),
        last_update_pause_s=max(publish.pauses_s.values(), default=0.0) if publish else 0.0,
        engine_occupancy=sum(record.occupancy for record in healthy) / len(healthy) if healthy else 0.0,
        engines=tuple(_engine(record) for record in records),
        actors=tuple(
            status.ActorStatus(name=alive.name, groups_in_flight=alive.groups_in_flight, silent_s=now - heard)
            for alive, heard in controller.actors.values()
        ),
        ledger=status.LedgerStatus(**controller.account.ledger()),
        knobs=controller.knobs.to_json(),
        waiting_for=controller.waiting_for(now=now),
        elapsed_s=elapsed_s,
        eta_s=remaining * (now - controller.training_since) / done if done and controller.training_since else None,
    )


def _phase(controller: Controller) -> status.Phase:
    if controller.phase is Phase.TRAINING and controller.evaluation is not None and controller.version == 0:
        return status.Phase.EVALUATING
    return status.Phase(controller.phase.value)


def _engine(record: EngineRecord) -> status.EngineStatus:
    return status.EngineStatus(
        url=record.url,
        state=record.standing.value,
        version=max(record.loaded, 0),
        running=record.metrics.running_sequences,
        waiting=record.metrics.waiting_sequences,
        slots=record.metrics.slots,
        tokens_per_s=record.tokens_per_s,
    )
