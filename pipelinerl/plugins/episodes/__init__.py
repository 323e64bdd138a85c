"""Episodes: users' programs that talk to the model through the gateway, which forwards requests to an engine."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EnvironmentComponent, GroupComponent, SourceComponent

EPISODES: Final = GroupComponent(
    build="pipelinerl.plugins.episodes.opening:open_episodes",
    check="pipelinerl.plugins.episodes.opening:check_environment",
    trial="pipelinerl.plugins.episodes.trial:episode_tried",
)

OPENENV: Final = EnvironmentComponent(build="pipelinerl.plugins.episodes.openenv:open_environment")

TASKSETS: Final = EnvironmentComponent(
    build="pipelinerl.plugins.episodes.opening:host_command",
    own_host=True,
    check="pipelinerl.plugins.episodes.opening:check_taskset",
    paths=frozenset({"python", "path"}),
)

NUMBERED: Final = SourceComponent(build="pipelinerl.plugins.episodes.numbered:open_numbered")
