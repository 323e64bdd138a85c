"""Commands that show runs from their files: a live web page, a terminal view, samples, comparisons and timelines."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent, Component

REPORT_PAGE: Final = Component(build="pipelinerl.plugins.watch.report:report_of")
REPORT: Final = CommandComponent(
    build="pipelinerl.plugins.watch.report:report",
    help="Write learning_curve.png and report.html of a run, live or finished.",
)

WATCH: Final = CommandComponent(
    build="pipelinerl.plugins.watch.command_line:watch",
    help="Show live, finished or crashed runs in the browser, and change live ones. "
    "Ctrl-C ends the server, not the run.",
)
TOP: Final = CommandComponent(
    build="pipelinerl.plugins.watch.command_line:top",
    help="Show a run in the terminal and change its knobs while it is live; q quits.",
)
MISMATCH: Final = CommandComponent(
    build="pipelinerl.plugins.watch.timeline.command_line:mismatch",
    help="Show how far trainer and sampler log-probs differ, by cause, and what to do about it; draws mismatch.png.",
)
TRACE: Final = CommandComponent(
    build="pipelinerl.plugins.watch.timeline.command_line:trace",
    help="Export a run's timeline for Perfetto: what each role and engine did when, and the origin of each version.",
)
SAMPLES: Final = CommandComponent(
    build="pipelinerl.plugins.watch.samples:samples",
    help="Show sampled answers: problem, answer, verdict, reward, advantage and versions, of a live or finished run.",
)
RUNS: Final = CommandComponent(
    build="pipelinerl.plugins.watch.compare:runs",
    help="List the runs of a folder, newest first: state, start, steps, accuracy and reward.",
)
COMPARE: Final = CommandComponent(
    build="pipelinerl.plugins.watch.compare:compare",
    help="Show runs side by side: results, and the settings in which their recipes differ.",
)
