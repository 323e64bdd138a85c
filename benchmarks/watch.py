"""How soon the page of a long run opens, what each of its routes takes, and what the server holds.

The run has 10⁵ steps and 10⁶ samples (a tenth of both with --quick), as records of the real types. `pipelinerl watch`
is started on it as a process; then, by its link:

    opening, at once    what the page asks first, from the moment that the link is there, while the logs are being read
    read                until the last event and the last sample are known
    opening, read       the same questions when all is known; then every route alone

Answers that come while the logs are read are of what has been read so far, the newest samples first, and say so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from benchmarks.measure import Row, print_table, write_record
from pipelinerl.config import recipe as recipes
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.samples.record import AnswerRecord, AnswerTokens, SampleGroup, SampleKind, TokenTexts
from pipelinerl.rng import generator
from pipelinerl.system.http_client import session

_TARGET_S: Final = 2.0
#: What docs/watching.md states.
_MOST_MIB: Final = 768
_DEADLINE_S: Final = 600.0
_ANSWERS: Final = 8
_FILE_BYTES: Final = 2**24
#: As many as a step of a real run has, beside those by domain.
_FIGURES: Final = 70

_OPENING: Final = (
    "/",
    "/api/run",
    "/api/steps?metrics=reward,entropy,length_mean,grad_norm,staleness_mean,wait_s&points=1500",
    "/api/now",
    "/api/samples",
)
_ROUTES: Final = (
    *_OPENING,
    "/api/steps?metrics=reward&from=50000&to=51000",
    "/api/samples?sort=reward&order=asc&tag=level%3D3",
    "/api/samples?sort=advantage&signal=with&domain=domain-1",
    "/api/knobs",
    "/api/engines",
    "/api/compare?metrics=reward&x=samples",
)


@dataclass(frozen=True, slots=True)
class Length:
    """Of a run."""

    steps: int
    groups: int


def made_run(folder: Path, length: Length) -> Path:
    """The directory of a run that has been killed after so many steps."""
    run_dir = folder / "run"
    run_dir.mkdir()
    recipes.save(recipes.load("tiny"), run_dir / "recipe.toml")
    recipes.write_layout(run_dir)
    _write_events(run_dir / "events.jsonl", length.steps)
    _write_samples(run_dir / "samples", length)
    return run_dir


def _write_events(path: Path, steps: int) -> None:
    noise = generator(0, "watch").random(steps + 1).tolist()
    with EventLog(path) as log:
        log.write("run_started", elapsed_s=0.0, run="long", knobs={"k": 4, "j": 1, "domain_weights": {"a": 1.0}})
        for step in range(1, steps + 1):
            at, value = float(step), noise[step]
            domain = {"rollouts": 32.0, "groups": 4.0, "reward": value, "accuracy": value, "length_mean": 200 * value,
                      "length_p95": 300.0, "truncated": 0.0, "stale_groups": 0.0, "all_right": 0.1}  # fmt: skip
            figures = {f"mismatch_numerics_figure_{number}": value / (number + 1) for number in range(_FIGURES)}
            log.write(
                "step", elapsed_s=at, step=step, model_version=step, orders=list(range(8 * step, 8 * step + 8)),
                rollouts=64.0, reward=value, entropy=value, length_mean=200 * value, grad_norm=value, wait_s=0.2,
                staleness_mean=value, step_s=0.8, sampled_tokens=12800.0, **figures,
                by_domain={f"domain-{number}": domain for number in range(3)},
            )  # fmt: skip
            log.write("publish", elapsed_s=at + 0.1, model_version=step, pause_s=0.001, engines=1, failed={})


def _write_samples(folder: Path, length: Length) -> None:
    folder.mkdir()
    draw, encoder = generator(1, "watch"), msgspec.json.Encoder()
    rewards = draw.random((length.groups, _ANSWERS)).round(3)
    text = "so the answer is that of the problem above, and it is given here in a sentence or two. " * 2
    file, written = (folder / "training-000001.jsonl").open("wb"), 0
    try:
        for number in range(length.groups):
            line = encoder.encode(made_group(number, length, rewards[number], text)) + b"\n"
            if written + len(line) > _FILE_BYTES:
                file.close()
                count = len(list(folder.iterdir()))
                file, written = (folder / f"training-{count + 1:06d}.jsonl").open("wb"), 0
            file.write(line)
            written += len(line)
    finally:
        file.close()


def made_group(number: int, length: Length, rewards: np.ndarray[Any, Any], text: str) -> SampleGroup:
    """The group of that number; every five hundredth has its tokens."""
    step = 1 + number * length.steps // length.groups
    tokens = AnswerTokens(
        tokens=TokenTexts(ids=tuple(range(200)), texts=("word",) * 200),
        versions=(step - 1,) * 200,
        logprobs=(-0.123456,) * 200,
        deltas=(1.2e-06,) * 200,
        advantages=(0.5,) * 200,
    )
    answers = tuple(
        AnswerRecord(
            text=text, outcome="correct" if reward > 0.5 else "wrong", reward=reward, advantage=reward - 0.5,
            length=200, finish_reason="stop", spans=((step - 1, 200),), staleness=1, trained=True,
            tokens=tokens if number % 500 == 0 else None,
        )
        for reward in rewards.tolist()
    )  # fmt: skip
    return SampleGroup(
        kind=SampleKind.TRAINED, step=step, time=float(step), group_id=f"prompt-{number:06d}",
        domain=f"domain-{number % 3}", problem_id=f"problem-{number}", tags=(f"level={number % 5}",), prompt=text,
        answers=answers,
    )  # fmt: skip


@contextmanager
def watching(run_dir: Path) -> Iterator[tuple[httpx.Client, int, float]]:
    """A session that has the page's cookie, the server's process, and how long its link took to come."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pipelinerl.cli", "watch", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://[^/]+)/(\S+)", process.stdout.readline())
        assert found is not None, "pipelinerl watch has printed no link"
        took = time.monotonic() - began
        with session(found[1], token=None, timeout_s=_DEADLINE_S) as http:
            http.get(f"/{found[2]}", follow_redirects=False)
            yield http, process.pid, took
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def opened(http: httpx.Client) -> float:
    """Seconds until everything that the page asks first was answered, one after the other."""
    began = time.monotonic()
    for path in _OPENING:
        http.get(path).raise_for_status()
    return time.monotonic() - began


def until_read(http: httpx.Client) -> float:
    """Seconds until all is known."""
    began = time.monotonic()
    while time.monotonic() - began < _DEADLINE_S:
        told = http.get("/api/run").raise_for_status().json()
        if min(told["loading"].values()) >= 1.0:
            return time.monotonic() - began
        time.sleep(0.2)
    raise TimeoutError(f"the server has not read the run within {_DEADLINE_S:g} s")


def peak_mib(pid: int) -> float:
    """What the process has held at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def run(quick: bool) -> None:
    """Make the run, watch it, print the table and write the record."""
    length = Length(10_000, 12_500) if quick else Length(100_000, 125_000)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-watch-") as name:
        run_dir = made_run(Path(name), length)
        sizes = {path.name: path.stat().st_size for path in (run_dir / "events.jsonl",)}
        sizes["samples"] = sum(path.stat().st_size for path in (run_dir / "samples").iterdir())
        os.sync()
        with watching(run_dir) as (http, pid, started):
            if http.get("/").status_code == 404:
                print("the page itself is not there; its routes are measured without it")
            at_once = opened(http)
            read = until_read(http)
            known = median(opened(http) for _ in range(5))
            told = http.get("/api/run").json()
            assert (told["step"], told["samples"]) == (length.steps, length.groups * _ANSWERS)
            routes = {path: median(_seconds(http, path) for _ in range(5)) for path in (*_ROUTES, *_one_group(http))}
            peak = peak_mib(pid)
    rows = [
        Row("opening, at once [s]", at_once, f"<= {_TARGET_S}", at_once <= _TARGET_S),
        Row("opening, read [s]", known, f"<= {_TARGET_S}", known <= _TARGET_S),
        Row("from its start to its link [s]", started),
        Row("all read after [s]", read),
        *(Row(f"{path} [ms]", 1e3 * seconds) for path, seconds in routes.items()),
        Row("most that the server held [MiB]", peak, f"<= {_MOST_MIB}", peak <= _MOST_MIB),
    ]
    print_table(f"the page of {length.steps:,} steps and {length.groups * _ANSWERS:,} samples", rows)
    record = {
        "quick": quick, "steps": length.steps, "samples": length.groups * _ANSWERS, "bytes": sizes,
        "opening_at_once_s": at_once, "opening_read_s": known, "link_s": started, "read_s": read,
        "routes_s": routes, "peak_mib": peak, "target_s": _TARGET_S,
    }  # fmt: skip
    write_record("watch", record)


def _one_group(http: httpx.Client) -> tuple[str, str]:
    """The routes of a group that has tokens."""
    group = http.get("/api/samples", params={"step": 1, "limit": 1, "sort": "step"}).json()["samples"][0]["group"]
    return f"/api/samples/{group}", "/api/samples?step=1&limit=200"


def _seconds(http: httpx.Client, path: str) -> float:
    began = time.monotonic()
    http.get(path).raise_for_status()
    return time.monotonic() - began
