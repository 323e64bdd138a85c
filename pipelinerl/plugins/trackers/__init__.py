"""Experiment trackers (TensorBoard, W&B, trackio), fed from a run's events by a separate process."""

from __future__ import annotations

from functools import partial
from typing import Final

from pipelinerl.component import CommandComponent, TrackerComponent
from pipelinerl.plugins.trackers.section import TrackioSection, WandbSection
from pipelinerl.roles.role import OnExit, Role, RoleOptions


# The tracker stops after the controller, because it forwards the controller's last events.
@partial(Role, name="tracker", on_exit=OnExit.SPARE, stop_order=5)
def tracker(options: RoleOptions) -> None:
    """Forward the run's metrics to the recipe's trackers (TensorBoard, W&B, trackio); the run does not wait for it."""
    from pipelinerl.plugins.trackers import role as tracker_role
    from pipelinerl.roles.catalogue import run_role

    run_role("tracker", options, tracker_role.run)


ROLE: Final = tracker


TENSORBOARD: Final = TrackerComponent(
    build="pipelinerl.plugins.trackers.tracker:open_tensorboard",
    switch="Write event files to `tensorboard/` in the run's directory.",
    needs=("tensorboardX",),
    remedy="pip install -e '.[track]'",
)
WANDB: Final = TrackerComponent(
    build="pipelinerl.plugins.trackers.tracker:WandbTracker",
    section=WandbSection,
    needs=("wandb",),
    remedy="pip install wandb",
)
TRACKIO: Final = TrackerComponent(
    build="pipelinerl.plugins.trackers.tracker:TrackioTracker",
    section=TrackioSection,
    needs=("trackio",),
    remedy="pip install trackio",
)
TRACK: Final = CommandComponent(
    build="pipelinerl.plugins.trackers.role:track",
    help="Export a run's metrics to TensorBoard, live or finished; a repeated call adds only the latest events.",
)
