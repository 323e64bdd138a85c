"""Dashboard, alert rules and documentation use exactly the metric names that the run's processes serve."""

import json
import re
from pathlib import Path

import httpx
import yaml

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.service.api import run_metrics
from pipelinerl.engines.http.server import METRICS_PREFIX
from pipelinerl.observability.status import (
    ActorStatus,
    EngineStatus,
    FleetStatus,
    HeldOutStatus,
    LastStepStatus,
    LedgerStatus,
    RestartStatus,
    RunStatus,
    StatusPhase,
    TrainerStatus,
    prometheus_text,
)
from tests.security.servers import TOKEN, application

DOCS = Path(__file__).parents[2] / "docs" / "reference"
FIGURES = (
    "reward", "accuracy", "loss", "grad_norm", "learning_rate", "entropy", "ess", "clip_fraction", "length_mean",
    "truncated", "staleness_mean", "staleness_max", "wait_s", "step_s", "publish_wait_s", "waiting_groups",
)  # fmt: skip
DOMAIN = (
    "reward", "accuracy", "length_mean", "truncated", "stale", "verifier_s", "verifier_errors",
    "turns", "environment_s", "tool_errors",
)  # fmt: skip
STATUS = RunStatus(
    run="tiny",
    phase=StatusPhase.TRAINING,
    step=7,
    fleet=FleetStatus(
        engines=(EngineStatus(url="http://a", name='e"0', state="healthy", version=6),), tokens_per_s=2.5
    ),
    held_out=HeldOutStatus(name="held_out", accuracy=0.5),
    last_step=LastStepStatus(by_domain={"math": dict.fromkeys(DOMAIN, 0.25)}),
    ledger=LedgerStatus(issued=9, trained=8, in_flight=1),
    actors=(ActorStatus(name="actor-0", groups_in_flight=2, silent_s=1.0),),
    trainer=TrainerStatus(last_report="StepDone", silent_s=0.5),
    restarts=(RestartStatus(name="trainer", deaths=2, unforgiven=1.0, limit=3),),
    alarms=("too long",),
)


def _controller():
    return run_metrics(STATUS, dict.fromkeys(FIGURES, 1.0))


def _names(text):
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


async def _parameter_server(tmp_path):
    transport = httpx.ASGITransport(application("parameter server", tmp_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        answer = await http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


async def test_dashboard_and_alerts_use_only_served_metrics(tmp_path):
    engine = prometheus_text(EngineMetrics().model_dump(), prefix=METRICS_PREFIX)
    answered = _names(_controller()) | _names(engine) | _names(await _parameter_server(tmp_path))
    for path in (DOCS / "grafana" / "dashboard.json", DOCS / "grafana" / "alerts.yaml"):
        used = set(re.findall(r"\bpipelinerl_[a-z0-9_]+", path.read_text()))
        assert len(used) >= 10 and used <= answered, sorted(used - answered)


def test_dashboard_and_alert_files_are_well_formed():
    panels = json.loads((DOCS / "grafana" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    (group,) = yaml.safe_load((DOCS / "grafana" / "alerts.yaml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 10
    for rule in group["rules"]:
        assert rule["expr"] and rule["for"] and rule["labels"]["severity"] and rule["annotations"]["summary"]


def test_documentation_lists_every_metric_of_the_controller():
    listed = re.findall(r"^\| `(pipelinerl_\w+)`", (DOCS / "prometheus.md").read_text(), re.MULTILINE)
    assert set(listed) == _names(_controller()) and len(listed) == len(set(listed))


def test_prometheus_metrics_of_the_controller_agree_with_the_status_that_it_serves():
    text = _controller()
    for line in (
        "pipelinerl_steps_total 7",
        'pipelinerl_orders_total{fate="trained"} 8',
        'pipelinerl_run_phase{phase="training"} 1',
        'pipelinerl_run_phase{phase="failed"} 0',
        'pipelinerl_fleet_engine_serves{url="http://a",name="e\\"0"} 1',
        'pipelinerl_process_deaths_total{process="trainer"} 2',
        'pipelinerl_domain_stale{domain="math"} 0.25',
        "pipelinerl_trainer_publish_wait_s 1",
    ):
        assert line in text.splitlines(), line
    assert "trainer_silent" not in run_metrics(RunStatus(run="new"), {}), "unknown values are not exported"
