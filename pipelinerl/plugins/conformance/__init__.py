"""Commands for developers: `pipelinerl conformance`, and in a checkout `bench` and `chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pipelinerl.component import CommandComponent

CHECKOUT: Final = Path(__file__).resolve().parents[3]
#: A checkout alone has the benchmarks and the fault scenarios.
_HIDDEN: Final = not (CHECKOUT / "benchmarks" / "__main__.py").is_file()

CONFORMANCE: Final = CommandComponent(
    build="pipelinerl.plugins.conformance.command_line:conformance_app",
    help="Check an engine or a trainer against its contract.",
)
BENCH: Final = CommandComponent(
    build="pipelinerl.plugins.conformance.command_line:bench",
    help="Run benchmarks and write their records (needs a checkout).",
    hidden=_HIDDEN,
)
CHAOS: Final = CommandComponent(
    build="pipelinerl.plugins.conformance.command_line:chaos",
    help="Inject seeded faults (kill, replace, starve processes); check that runs lose nothing (needs a checkout).",
    hidden=_HIDDEN,
)
