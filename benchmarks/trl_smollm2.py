"""Train SmolLM2-135M on two cores: accuracy within half an hour, and time compared with TRL's.

Both arms train `examples/smollm2/json_facts.toml` with three seeds, as `benchmarks/trl.py` describes. Install `pip
install -e '.[smollm2]'` first; the example's own script fetches the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.arms import PICTURES, panels
from benchmarks.measure import RESULTS, Row, print_table, write_record
from benchmarks.processes import python
from benchmarks.trl import Arm, Task, on_two_cores, recorded

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "smollm2"
SMOLLM2: Final = Task(
    recipe=str(EXAMPLE / "json_facts.toml"),
    targets=(0.80, 0.90),
    most_time=0.4,
    most_time_per_step=0.25,
    goal=0.2,
    probe_steps=1,
    probe_tries=1,  # one try, since a step takes most of a minute
)
STEPS: Final = 30
HALF_AN_HOUR_S: Final = 1800.0
GAIN: Final = 0.25


def fetch_model() -> None:
    """Download the model if it is missing."""
    python([str(EXAMPLE / "fetch_model.py")])


def gain(arm: Arm) -> float:
    """Return the best held-out accuracy within half an hour, minus that before training."""
    return max(accuracy for _, seconds, accuracy in arm.curve if seconds <= HALF_AN_HOUR_S) - arm.curve[0][2]


def run(quick: bool = False, *, seeds: Sequence[int] = ()) -> None:
    """Run the benchmark, print its table and record it; with `seeds`, recorded results of other seeds are kept."""
    fetch_model()
    overrides = [f"run.steps={STEPS}"]
    known = recorded("trl_smollm2", SMOLLM2.recipe, overrides) if seeds else {}
    for payload in on_two_cores(SMOLLM2, seeds or range(1 if quick else 3), overrides=overrides, known=known):
        gains = [gain(Arm(**arm)) for arm in payload["ours"]]
        shown = ", ".join(f"{100 * each:+.0f}" for each in gains)
        least = Row("held-out points won in 30 minutes, by seed", shown, f">= {100 * GAIN:g}", min(gains) >= GAIN)
        print_table("SmolLM2-135M on the example's task", [least])
        write_record("trl_smollm2", {"gains": gains, **payload}, quick=quick)


def plot(record: Path = RESULTS / "trl_smollm2.json", picture: Path = PICTURES / "smollm2.png") -> None:
    """Draw held-out accuracy over seconds for pipelinerl and for TRL, a line per seed."""
    arms = json.loads(record.read_text())

    def draw(axes: Sequence[Any]) -> None:
        (panel,) = axes
        for name, label, colour in (("ours", "pipelinerl", "#2a78d6"), ("trl", "TRL's GRPOTrainer", "#e0662f")):
            for number, arm in enumerate(arms[name]):
                _, seconds, accuracy = np.transpose(arm["curve"])
                panel.plot(seconds, 100 * accuracy, "o-", color=colour, label=None if number else label)
        panel.set(
            xlabel="seconds of training, two CPU cores", ylabel="held out, % right", ylim=(40, 102), xlim=(0, None)
        )
        panel.set_title("SmolLM2-135M learns to turn sentences into JSON, three seeds")
        panel.legend(frameon=False, loc="lower right")

    panels(picture, draw, lines=1, columns=1, width=8.0)
