"""Draw a run's state and metrics as lines of text, for a terminal of at least 40 columns. Pure functions.

Names from recipes and error texts are untrusted, so they are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from pipelinerl.observability.samples import one_line
from pipelinerl.observability.status import HeldOutStatus, format_duration, reward_words, staleness_words
from pipelinerl.plugins.watch.top.run_follower import RunSnapshot

_STATE_STYLES: Final = {"live": "bold green", "finished": "bold cyan", "starting": "bold yellow", "suspended": "bold"}
_LABEL: Final = 10
#: Width of a label and its value, in columns; a terminal that is twice as wide shows two pairs per line.
_FIGURE: Final = 22
#: Minimum width of the terminal, in columns, at which each engine's number of running sequences is shown.
_LOADS: Final = 42
#: Maximum number of domains and of engines on the screen; `pipelinerl status` and `engines list` show all.
_MOST: Final = 12


def figures(snapshot: RunSnapshot, width: int) -> Text:
    """Return the run's state and metrics in lines of at most `width` columns; longer sentences wrap."""
    status, ledger = snapshot.status, snapshot.ledger
    lines = [*_head(snapshot, width), *_pairs(snapshot, width), *_domains(snapshot, width), *_engines(snapshot, width)]
    if ledger is not None:
        parts = ("trained", "filtered", "stale", "failed", "in_flight")
        sum_of_parts = " + ".join(f"{getattr(ledger, part):,} {part.replace('_', ' ')}" for part in parts)
        lines.append(Text.assemble((f"{'prompts':<{_LABEL}}", "dim"), f"{ledger.issued:,} = {sum_of_parts}"))
    if snapshot.waits:
        lines.append(Text("time of the last steps", "dim"))
        lines += [Text(f"{share:>5.0%} {cause}") for cause, share in snapshot.waits]
    lines += [Text.assemble(("alarm ", "bold red"), one_line(alarm)) for alarm in status.alarms]
    if snapshot.unread:
        lines.append(Text(f"{snapshot.unread:,} events of the log could not be read", "red"))
    if status.waiting_for:
        lines.append(Text.assemble(("waits for ", "yellow"), one_line(status.waiting_for)))
    return Text("\n").join(lines)


def knob_value(value: Any) -> str:
    """Format a knob's value so that it can be typed in again."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _head(snapshot: RunSnapshot, width: int) -> Iterator[Text]:
    status = snapshot.status
    name = Text.assemble(
        (one_line(status.run), "bold"), " ", (snapshot.state, _STATE_STYLES.get(snapshot.state, "bold red"))
    )
    age = format_duration(status.elapsed_s)
    left = "" if status.eta_s is None or snapshot.state != "live" else f", {format_duration(status.eta_s)} to go"
    right = age + left if name.cell_len + len(age + left) < width else age
    name.truncate(max(1, width - len(right) - 1), overflow="ellipsis")
    yield name + Text(" " * max(1, width - name.cell_len - len(right))) + Text(right, "dim")
    count = f"{status.step:,}/{status.total_steps:,}" if status.total_steps else f"step {status.step:,}"
    room = max(4, width - len(count) - 1)
    done = min(room, room * status.step // status.total_steps) if status.total_steps else 0
    yield Text.assemble(("━" * done, "cyan"), ("─" * (room - done), "dim"), " ", (count, "bold"))


def _pairs(snapshot: RunSnapshot, width: int) -> Iterator[Text]:
    status, step = snapshot.status, snapshot.status.last_step
    pairs = {
        "reward": reward_words(step.reward, step.unjudged),
        "held out": _held_out(status.held_out),
        "version": f"{status.model_version:,}",
        "staleness": staleness_words(step.staleness_mean, step.staleness_max),
        "tokens/s": f"{status.fleet.tokens_per_s:,.0f}",
        "engines": f"{status.fleet.occupancy:.0%} busy",
        "entropy": _figure(step.entropy, ".3f"),
        "length": _figure(step.length_mean, ",.1f"),
        "truncated": _figure(step.truncated, ".0%"),
        "pause": f"{1e3 * status.fleet.update_pause_s:,.1f} ms",
    }
    if status.epoch > 1:
        pairs["trainers"] = f"{status.epoch} so far"
    cells = [Text.assemble((f"{label:<{_LABEL}}", "dim"), value) for label, value in pairs.items()]
    columns = 2 if width >= 2 * _FIGURE else 1
    for at in range(0, len(cells), columns):
        row = cells[at : at + columns]
        if columns == 2:
            row[0].truncate(width // 2 - 1, pad=True, overflow="ellipsis")
        line = Text(" ").join(row)
        line.truncate(width, overflow="ellipsis")
        yield line


def _domains(snapshot: RunSnapshot, width: int) -> Iterator[Text]:
    by_domain = sorted(snapshot.status.last_step.by_domain.items())
    room = max(8, width - 24)
    if by_domain:
        yield Text(f"{'domain':<{room}}{'right':>7}{'reward':>8}{'stale':>8}", "dim")
    for name, each in by_domain[:_MOST]:
        row = f"{_share(each, 'accuracy'):>7}{_figure(each.get('reward'), '.3f'):>8}{_share(each, 'stale'):>8}"
        yield Text(_fitted(one_line(name), room) + row)
    yield from _more(len(by_domain))


def _engines(snapshot: RunSnapshot, width: int) -> Iterator[Text]:
    engines = snapshot.status.fleet.engines
    loads = width >= _LOADS
    room = max(8, width - (31 if loads else 25))
    if engines:
        load = f"{'works':>6}" if loads else ""
        yield Text(f"{'engine':<{room}}{'state':>11}{'version':>8}{load}{'tok/s':>6}", "dim")
    for each in engines[:_MOST]:
        name = _fitted(one_line(each.name or each.url.removeprefix("http://")), room)
        version = "-" if each.version is None else each.version
        counts = f"{version:>8}{f'{each.running:>6}' if loads else ''}{each.tokens_per_s:>6.0f}"
        yield Text.assemble(name, (f"{each.state:>11}", "green" if each.serves else "red"), counts)
        if each.note and (each.speed < 1 or not each.serves):
            yield Text("  " + one_line(each.note), "dim")
    yield from _more(len(engines))
    present = {engine.name for engine in engines}
    for requested in snapshot.status.fleet.requested:
        if requested.name not in present:
            yield Text(f"{one_line(requested.name)} is requested", "dim")


def _more(count: int) -> Iterator[Text]:
    if count > _MOST:
        yield Text(f"and {count - _MOST} more", "dim")


def _held_out(held_out: HeldOutStatus) -> str:
    if held_out.accuracy is None:
        return "–"
    known = held_out.low is not None and held_out.high is not None
    spread = f" ±{(held_out.high - held_out.low) / 2:.1%}" if known else ""  # type: ignore[operator]
    return f"{held_out.accuracy:.1%}{spread}"


def _fitted(name: str, width: int) -> str:
    text = Text(name)
    text.truncate(width - 1, overflow="ellipsis")
    text.pad_right(width - text.cell_len)
    return text.plain


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _share(each: Mapping[str, float], name: str) -> str:
    return f"{each[name]:.0%}" if name in each else "–"
