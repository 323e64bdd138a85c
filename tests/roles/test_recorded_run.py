"""Which lineage a recorded step is of: that of its trainer, and of all that began before."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.observability.events import EventLog
from pipelinerl.roles.recorded_run import recorded_steps
from pipelinerl.training.admission import Lineage


def test_a_step_knows_the_epochs_before_its_own(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("run_started", run="ended", elapsed_s=0.0)
        for epoch, began_at in ((1, 0), (2, 1), (3, 2)):
            events.write("trainer_ready", epoch=epoch, model_version=began_at, elapsed_s=0.0)
            for step in (began_at + 1, began_at + 2):
                events.write("step", step=step, model_version=step, orders=[step], elapsed_s=1.0)
    found = {version: step.lineage for version, step in recorded_steps(tmp_path).items()}
    assert found == {
        1: Lineage(1, 0),
        2: Lineage(2, 1, earlier=((1, 0),)),
        3: Lineage(3, 2, earlier=((1, 0), (2, 1))),
        4: Lineage(3, 2, earlier=((1, 0), (2, 1))),
    }
