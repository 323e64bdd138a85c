"""Reports that need no decision: they are only recorded as events and shown in the status."""

from __future__ import annotations

from pipelinerl.controller.state.effects import Effect, Record
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.messages import CheckpointDelayed, Checkpointed, GroupHandedOver, Published, StepSkipped


def step_skipped(report: StepSkipped, *, step: int) -> Record:
    """Return the event of a step that was skipped because its loss, gradient or log-probs were not finite."""
    fields = {"step": step, "what": report.what, "groups": report.groups, "in_a_row": report.in_a_row}
    return Record("step_skipped", fields)


def published(report: Published) -> Record:
    """Return the event of a publication, with its figures."""
    return Record(
        "publish",
        {
            "model_version": report.model_version,
            "send_s": report.send_s,
            "total_s": report.total_s,
            "pause_s": max(report.pauses_s.values(), default=0.0),
            "pauses_s": report.pauses_s,
            "engines": len(report.pauses_s),
            "failed": report.failed,
        },
    )


def handed_over(report: GroupHandedOver) -> Record:
    """Return the event of a group that one engine began and another finished."""
    fields = {"order_id": report.order_id, "tokens_kept": report.tokens_kept}
    return Record("group_handed_over", fields | {"tokens_resampled": report.tokens_resampled})


def checkpointed(state: RunState, report: Checkpointed | CheckpointDelayed) -> list[Effect]:
    """Return the event of a checkpoint; a delay is reported repeatedly, but recorded once, and shown while it lasts."""
    version = report.model_version
    if isinstance(report, Checkpointed):
        state.trainer.unsaved = ""
        fields = {"path": report.path, "model_version": version, "stall_s": report.stall_s}
        return [Record("checkpoint", fields)]
    is_new = not state.trainer.unsaved
    state.trainer.unsaved = f"the checkpoint of step {version} cannot be written yet: {report.reason}"
    return [Record("checkpoint_delayed", {"model_version": version, "reason": report.reason})] if is_new else []
