"""Show and change a live run from the command line: `pipelinerl knobs …` and `pipelinerl engines …`."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

KNOBS: Final = CommandComponent(
    build="pipelinerl.plugins.steering.knobs:knobs_app", help="Show or change the knobs of a live run."
)
ENGINES: Final = CommandComponent(
    build="pipelinerl.plugins.steering.engines:engines_app", help="List the engines of a live run, or change them."
)
