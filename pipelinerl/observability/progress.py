"""The live display of a run: a progress bar and metrics on a terminal, or a plain line every few seconds elsewhere.

    with ProgressDisplay() as progress:
        progress.show(status)          # call whenever a status arrives; 1 to 4 times a second looks live

On a terminal the block redraws in place, and other output scrolls above it. If stdout is a file or a pipe, a line is
printed when the phase, an evaluation or an alarm changes, or after `line_every_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.observability.samples import one_line, visible
from pipelinerl.observability.status import (
    EngineStatus,
    EvaluatingStatus,
    HeldOutStatus,
    LastStepStatus,
    RunStatus,
    StatusPhase,
    format_duration,
    format_milliseconds,
    restarts_line,
    reward_words,
    staleness_words,
)

_BARS = "▁▂▃▄▅▆▇█"
#: Minimum width of a terminal, in characters, to show the reward curve.
_CURVE_COLUMNS = 24
#: Minimum width of a terminal, in characters, to show metrics by domain.
_DOMAIN_COLUMNS = 60
#: Maximum number of domains, and of metrics per domain, on a terminal; `pipelinerl status` shows all.
_MOST_DOMAINS = 8
_DOMAIN_FIGURES = 5
#: Maximum number of domains whose accuracy is shown; `status --json` and the report show all.
_DOMAINS_SHOWN = 4
#: The share of truncated answers is shown with the accuracy if it is at least this.
_SHOWN_FROM = 0.01
#: The line shows the share of tokens discarded as stale if it is at least this.
_DISCARDED_FROM = 0.001
_PHASE_STYLE = {StatusPhase.FINISHED: "bold green", StatusPhase.FAILED: "bold red", StatusPhase.STARTING: "bold yellow"}


class ProgressDisplay:
    """Display of a run's progress. A context manager, so the terminal is restored on every exit."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        line_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._line_every_s = line_every_s
        self._clock = clock
        self._live: Live | None = None
        self._rewards: list[float] = []
        self._step = -1
        self._printed_at = float("-inf")
        self._printed: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, status: RunStatus) -> None:
        """Update the display with `status`; without a terminal, print a line if one is due."""
        if status.step != self._step and status.last_step.reward is not None:
            self._step = status.step
            self._rewards.append(status.last_step.reward)
        if self._live is not None:
            self._live.update(render(status, width=self.console.width, rewards=self._rewards))
            return
        now = self._clock()
        accuracies = [each.accuracy for each in (status.held_out, *status.other_sets)]
        news = (status.phase, accuracies, status.alarms)
        if now - self._printed_at >= self._line_every_s or news != self._printed:
            self.console.print(line(status), highlight=False, markup=False, soft_wrap=True)
            self._printed_at, self._printed = now, news


def render(status: RunStatus, *, width: int, rewards: Sequence[float] = ()) -> RenderableType:
    """Return the display for a terminal of `width` columns: bar, metrics, rewards, engines, cause of waiting."""
    parts: list[RenderableType] = [
        _head(status),
        _numbers(status, pairs=3 if width >= 104 else 2 if width >= 60 else 1),
    ]
    if status.other_sets:
        parts.append(sets := Table.grid(padding=(0, 2)))
        for each in status.other_sets:
            since = "" if each.first is None or each.accuracy is None else f"(from {each.first:.1%})"
            sets.add_row(Text(each.name, style="dim"), Text(_accuracy(each), style="bold"), Text(since, style="dim"))
    if len(rewards) > 1 and width >= _CURVE_COLUMNS:
        parts.append(Text.assemble(("reward so far  ", "dim"), (sparkline(rewards, width=min(60, width - 16)), "cyan")))
    if len(status.last_step.by_domain) > 1 and width >= _DOMAIN_COLUMNS:
        parts.append(domains := Table.grid(padding=(0, 2)))
        for name, figures in sorted(status.last_step.by_domain.items())[:_MOST_DOMAINS]:
            cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in _domain(figures)[:_DOMAIN_FIGURES]]
            domains.add_row(Text(name, style="bold"), *cells)
    if len(status.fleet.engines) > 1:
        parts.append(_engines(status.fleet.engines))
    if status.evaluating is not None:
        parts.append(Text(_evaluating(status.evaluating), style="dim"))
    if status.lag:
        parts.append(Text(visible(status.lag), style="dim"))
    parts += [Text(visible(line), style="dim") for line in server_lines(status)]
    parts += [Text.assemble(("alarm ", "bold red"), visible(alarm)) for alarm in status.alarms]
    if status.restarts:
        parts.append(Text(restarts_line(status.restarts), style="dim"))
    if status.waiting_for:
        parts.append(Text.assemble(("waits for ", "yellow"), visible(status.waiting_for)))
    return Group(*parts)


def line(status: RunStatus) -> str:
    """Return the status as one line of plain text."""
    parts = [
        f"[{status.run}] {status.phase.value} {status.step}/{status.total_steps}",
        f"reward {reward_words(status.last_step.reward, status.last_step.unjudged)}",
        f"held-out {_accuracy(status.held_out)}",
        *(f"{each.name} {_accuracy(each)}" for each in status.other_sets),
        f"{status.fleet.tokens_per_s:,.0f} tok/s",
        f"staleness {staleness_words(status.last_step.staleness_mean, status.last_step.staleness_max)}",
        *([f"length {_length(status.last_step)}"] if status.last_step.discarded >= _DISCARDED_FROM else ()),
        f"pause {format_milliseconds(status.fleet.update_pause_s)}",
        f"engines {status.fleet.occupancy:.0%}",
        f"{format_duration(status.elapsed_s)}, {_eta(status)}",
    ]
    if status.evaluating is not None:
        parts.append(_evaluating(status.evaluating))
    parts += [f"ALARM {alarm}" for alarm in status.alarms]
    if status.restarts:
        parts.append(restarts_line(status.restarts))
    if status.waiting_for:
        parts.append(f"waits for {status.waiting_for}")
    return visible(" · ".join(parts))


def server_lines(status: RunStatus) -> list[str]:
    """Return a line of plain text for each parameter server: `parameter server http://a:1: shard 0, replica 1, up`."""
    return [
        f"parameter server {each.url}: shard {each.shard}, replica {each.replica}, {each.state}"
        + (f" ({each.last_error})" if each.last_error else "")
        for each in status.parameter_servers
    ]


def incident_lines(status: RunStatus) -> list[str]:
    """Return a line of plain text for each incident: `engine lost, 2 times, 41 s, not over: http://a:1: no answer`."""
    return [
        ", ".join(
            part
            for part in (
                each.kind.replace("_", " "),
                f"{each.count} times" if each.count > 1 else "",
                format_duration(each.seconds) if each.seconds else "",
                "not over" if each.ongoing else "",
            )
            if part
        )
        + (f": {one_line(each.what)}" if each.what else "")
        for each in status.incidents
    ]


def domain_lines(status: RunStatus) -> list[str]:
    """Return a line of plain text for each domain and each tag of the last step."""
    step = status.last_step
    names = [*step.by_domain.items(), *((f"tag {tag}", figures) for tag, figures in step.by_tag.items())]
    return [
        # `one_line` makes tags, which are untrusted, safe to display.
        one_line(f"{name}: {' · '.join(f'{label} {value}' for label, value in _domain(figures))}")
        for name, figures in names
    ]


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw `values` as at most `width` bars from ▁ (minimum) to █ (maximum), averaging neighbours if needed."""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[int((mean - low) / span * 7.999) if span > 0 else 0] for mean in means)


def _head(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(
        Text.assemble((status.run, "bold"), " ", (status.phase.value, _PHASE_STYLE.get(status.phase, "bold cyan"))),
        ProgressBar(
            total=max(1, status.total_steps), completed=status.step, complete_style="cyan", finished_style="green"
        ),
        Text.assemble(
            (f"{status.step}/{status.total_steps}", "bold"), f"  {format_duration(status.elapsed_s)}, {_eta(status)}"
        ),
    )
    return grid


def _numbers(status: RunStatus, *, pairs: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in range(pairs):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=9)
    held_out = Text(_accuracy(status.held_out), style="bold")
    if status.held_out.first is not None and status.held_out.accuracy is not None:
        held_out.append(f"  (from {status.held_out.first:.1%})", style="dim not bold")
    ledger, step = status.ledger, status.last_step
    entropy = "–" if step.entropy is None else f"{step.entropy:.3f}"
    rows: tuple[tuple[str, Text | str], ...] = (
        ("reward", Text(reward_words(status.last_step.reward, status.last_step.unjudged), style="bold")),
        ("held-out", held_out),
        ("tokens/s", f"{status.fleet.tokens_per_s:,.0f}"),
        ("staleness", staleness_words(status.last_step.staleness_mean, status.last_step.staleness_max)),
        ("update pause", format_milliseconds(status.fleet.update_pause_s)),
        ("engines", f"{status.fleet.occupancy:.0%} busy"),
        ("entropy", entropy + ("" if step.exact_entropy is None else f", exact {step.exact_entropy:.3f}")),
        ("length", _length(step)),
        ("version", f"v{status.model_version}" + (f", epoch {status.epoch}" if status.epoch > 1 else "")),
        ("in flight", f"{ledger.in_flight:,} prompts"),
        ("dropped", f"{ledger.stale:,} stale, {ledger.filtered:,} flat, {ledger.failed:,} failed"),
    )
    if step.optimizer_steps is not None:
        kl = "" if step.kl_old is None else f", KL {step.kl_old:.2g}"
        clipped = "" if step.clip_fraction is None else f", {step.clip_fraction:.1%} clipped"
        rows = (*rows, ("optimizer", f"{step.optimizer_steps} steps{kl}{clipped}"))
    for start in range(0, len(rows), pairs):
        grid.add_row(*(cell for pair in rows[start : start + pairs] for cell in pair))
    return grid


def _engines(engines: tuple[EngineStatus, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for engine in engines:
        style = "green" if engine.serves else "red"
        grid.add_row(
            Text(engine.url, style="dim"),
            Text(engine.state, style=style),
            "no weights yet" if engine.version is None else f"v{engine.version}",
            f"{engine.running}/{engine.slots} running",
            f"{engine.waiting} waiting",
            f"{engine.tokens_per_s:,.0f} tok/s",
            Text(engine.note, style="yellow"),
        )
    return grid


def _domain(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    forms = (
        ("reward", "reward", ".3f"),
        ("right", "accuracy", ".0%"),
        ("tokens", "length_mean", ".1f"),
        ("truncated", "truncated", ".0%"),
        ("stale", "stale", ".0%"),
        ("P95", "length_p95", ".0f"),
        ("all right", "all_right", ".0%"),
        ("all wrong", "all_wrong", ".0%"),
        ("unjudged", "unjudged", ".0%"),
        ("rollouts", "rollouts", ".0f"),
        ("turns", "turns", ".1f"),
        ("outside the model, s", "environment_s", ".2f"),
        ("calls", "calls_parsed", ".0f"),
        ("failed calls", "tool_errors", ".0f"),
        ("malformed calls", "calls_malformed", ".0f"),
    )
    cells = [(label, format(figures[name], form)) for label, name, form in forms if name in figures]
    if "verifier_s" in figures:
        cells.append(
            ("verifier", f"{format_milliseconds(figures['verifier_s'])}, {figures['verifier_errors']:.0f} errors")
        )
    parts = [(name.removeprefix("reward."), f"{value:.3f}") for name, value in figures.items() if "reward." in name]
    return [*cells, *parts]


def _length(step: LastStepStatus) -> str:
    if step.length_mean is None:
        return "–"
    text = f"{step.length_mean:,.1f} tokens"
    if step.truncated:
        text += f", {step.truncated:.0%} truncated"
    if step.discarded >= _DISCARDED_FROM:  # trained ÷ sampled length below 1 favours short answers
        text += f", {step.discarded:.1%} discarded, trained ÷ sampled {step.length_ratio:.3f}"
    return text


def _accuracy(held_out: HeldOutStatus) -> str:
    if held_out.accuracy is None:
        return "–"
    text = f"{held_out.accuracy:.1%}"
    if held_out.low is not None and held_out.high is not None:
        text += f" ±{(held_out.high - held_out.low) / 2:.1%}"
    if held_out.pass_at:
        best = held_out.pass_at[-1]
        text += f", pass@{best.k} {best.value:.1%}"
    if held_out.majority_at:
        most = held_out.majority_at[-1]
        text += f", maj@{most.k} {most.value:.1%}"
    if (held_out.truncated or 0.0) >= _SHOWN_FROM:
        text += f", {held_out.truncated:.0%} truncated"
    if held_out.incomplete:
        text += ", incomplete"
    text += f" of v{held_out.version}" if held_out.one_version else ""
    domains = [each for each in held_out.by_domain if each.accuracy is not None]
    if len(domains) > 1:
        shown = ", ".join(f"{each.name} {each.accuracy:.1%}" for each in domains[:_DOMAINS_SHOWN])
        more = len(domains) - _DOMAINS_SHOWN
        text += f" ({shown}{f' and {more} more' if more > 0 else ''})"
    return text


def _evaluating(evaluating: EvaluatingStatus) -> str:
    where = f" on {evaluating.engine}" if evaluating.engine else ""
    again = f", {evaluating.discarded} answers of other versions discarded" if evaluating.discarded else ""
    sets = f" ({', '.join(evaluating.sets)})" if len(evaluating.sets) > 1 else ""
    return f"evaluating v{evaluating.model_version}{where}{sets}: {evaluating.answered}/{evaluating.problems}{again}"


def _eta(status: RunStatus) -> str:
    if status.phase.is_over:
        return "over"
    return "ETA –" if status.eta_s is None else f"ETA {format_duration(status.eta_s)}"
