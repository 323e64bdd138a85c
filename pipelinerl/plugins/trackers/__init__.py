"""Experiment trackers (TensorBoard, W&B, trackio), fed from a run's events by a separate process."""

from __future__ import annotations

from functools import partial
from typing import Final

from pipelinerl.roles.role import OnExit, Role, RoleOptions


# The tracker stops after the controller, because it forwards the controller's last events.
@partial(Role, name="tracker", on_exit=OnExit.SPARE, stop_order=5)
def tracker(options: RoleOptions) -> None:
    """Forward the run's metrics to the recipe's trackers (TensorBoard, W&B, trackio); the run does not wait for it."""
    from pipelinerl.plugins.trackers import role as tracker_role
    from pipelinerl.roles.catalogue import run_role

    run_role(options, tracker_role.run)


ROLE: Final = tracker
