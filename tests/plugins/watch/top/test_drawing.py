"""The text that `pipelinerl top` draws: metrics that fit the width, with labels and without control characters."""

import msgspec
import pytest
from rich.cells import cell_len

from pipelinerl.observability.status import (
    EngineStatus,
    FleetStatus,
    HeldOutStatus,
    LastStepStatus,
    LedgerStatus,
    RequestedEngine,
    RunStatus,
)
from pipelinerl.plugins.watch.top.drawing import figures, knob_value
from pipelinerl.plugins.watch.top.run_follower import RunSnapshot

HOSTILE = "[red]\x1b[2J\u202e日本"
LEDGER = LedgerStatus(issued=112, trained=96, filtered=8, in_flight=8)
STATUS = RunStatus(
    run="speller",
    step=1180,
    total_steps=40_000,
    model_version=1180,
    epoch=2,
    last_step=LastStepStatus(
        reward=0.412, staleness_mean=1.25, staleness_max=3, entropy=0.5, length_mean=5.8, truncated=0.02,
        by_domain={"short_words": {"reward": 0.5, "accuracy": 0.51, "stale": 0.02}, HOSTILE * 9: {"reward": 0.25}},
    ),
    held_out=HeldOutStatus(accuracy=0.412, low=0.38, high=0.44),
    fleet=FleetStatus(
        engines=(
            EngineStatus(url="http://a:1", name="engine-0", state="healthy", version=1180, tokens_per_s=812.4),
            EngineStatus(url="http://10.0.0.1:4002", state="expelled", version=9, last_error=HOSTILE),
        ),
        requested=(RequestedEngine(name="engine-0", type="torch"), RequestedEngine(name="engine-7", type="torch")),
        tokens_per_s=812.4,
        occupancy=0.7,
        update_pause_s=0.0012,
    ),
    alarms=(f"{HOSTILE} is stale",),
    waiting_for="step 1181: 3 groups",
    elapsed_s=312.0,
    eta_s=60.0,
)  # fmt: skip
SNAPSHOT = RunSnapshot(
    status=STATUS, state="live", knobs={}, ledger=LEDGER, waits=(("engines: sampling the next batch", 0.31),)
)


@pytest.mark.parametrize("width", [40, 44, 61, 80, 200])
def test_drawn_lines_fit_the_width_and_show_all_metrics_of_the_run(width):
    output = figures(SNAPSHOT, width).plain
    rows = output.splitlines()
    long_lines = ("prompts", "alarm", "waits for", "  ")  # beginnings of lines that may be wrapped
    assert all(cell_len(row) <= width for row in rows if not row.startswith(long_lines)), rows
    for wanted in ("speller live", "1,180/40,000", "0.412", "41.2% ±3.0%", "2 so far", "1.2, max 3", "812", "70% busy",
                   "1.2 ms", "51%", "healthy", "expelled", "engine-7 is requested", " 31% engines: sampling",
                   "112 = 96 trained + 8 filtered + 0 stale + 0 failed + 8 in flight", "step 1181"):  # fmt: skip
        assert wanted in output, wanted


def test_control_characters_in_names_from_a_run_are_escaped():
    output = figures(SNAPSHOT, 80)
    assert "\x1b" not in output.plain and "\u202e" not in output.plain and "\\x1b[2J\\u202e" in output.plain
    assert "[red]" in output.plain, "markup is text"


def test_domains_and_engines_that_exceed_the_display_limit_are_shown_as_a_count():
    engines = tuple(EngineStatus(url=f"http://h:{n}", state="healthy") for n in range(40))
    last = LastStepStatus(by_domain={f"d{n}": {"reward": 0.0} for n in range(15)})
    status = msgspec.structs.replace(STATUS, fleet=FleetStatus(engines=engines), last_step=last)
    output = figures(RunSnapshot(status=status, state="live", knobs={}, ledger=None), 80).plain
    assert "and 28 more" in output and "and 3 more" in output


def test_displayed_knob_value_can_be_entered_again_without_loss_of_precision():
    assert [knob_value(value) for value in (4, 4.0, 1e-6, float("inf"), "inf")] == ["4", "4", "1e-06", "inf", "inf"]
    assert knob_value(0.000123456789) == "0.000123456789", "no digit is lost"
