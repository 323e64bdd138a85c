"""Environments that are OpenEnv servers, reached over WebSockets."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EnvironmentComponent

COMPONENT: Final = EnvironmentComponent(build="pipelinerl.plugins.openenv.environment:open_environment")
