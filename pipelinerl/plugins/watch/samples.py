"""`pipelinerl samples`: a run's sampled answers with their verdicts, rewards and advantages.

It reads only files in the run's directory and contacts no process, so the run may be live, finished or crashed. Model
output is escaped, so that it cannot affect the terminal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from pipelinerl.errors import UserError
from pipelinerl.observability.events import ENDS, EventFollower
from pipelinerl.observability.samples import (
    FOLDER,
    LENGTH,
    AnswerRecord,
    ChosenSample,
    Ranking,
    SampleGroup,
    SampleKind,
    SampleQuery,
    SampleReader,
    TurnRecord,
    one_line,
    read_samples,
    shortened,
    visible,
)
from pipelinerl.roles.role import RunPath

#: Maximum number of characters printed of a text; `--json` prints the whole stored text.
_MOST: Final = 2000
_FOLLOW_S: Final = 0.5
_STYLES: Final = {"correct": "green", "partial": "yellow", "wrong": "red"}


def samples(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Only samples of this step.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only samples of this domain.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only problems with this tag.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only truncated answers.")] = False,
    filtered: Annotated[bool, typer.Option("--filtered", help="Filtered groups, one for each step.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Answers to held-out problems.")] = False,
    evaluation_set: Annotated[str | None, typer.Option(help="Only answers to this evaluation set.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 16,
    follow: Annotated[bool, typer.Option("--follow", help="Keep showing new samples until the run is over.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each answer.")] = False,
) -> None:
    """Show sampled answers: problem, answer, verdict, reward, advantage and versions, of a live or finished run."""
    if worst and best:
        raise typer.BadParameter("--worst and --best exclude each other")
    if follow and (worst or best):
        raise typer.BadParameter("--follow shows samples as they come: leave out --worst and --best")
    kinds = {SampleKind.FILTERED} if filtered else set()
    kinds |= {SampleKind.EVALUATION} if evaluation or evaluation_set is not None else set()
    query = SampleQuery(
        kinds=frozenset(kinds or {SampleKind.TRAINED}),
        step=step,
        domain=domain,
        tag=tag,
        evaluation=evaluation_set,
        finish_reason=LENGTH if truncated else None,
        ranking=Ranking.WORST if worst else Ranking.BEST if best else Ranking.NEWEST,
        limit=limit,
    )
    (follow_new if follow else show)(run_dir, query, Console(soft_wrap=True), as_json=json)


def show(run_dir: Path, query: SampleQuery, console: Console, *, as_json: bool) -> None:
    """Print the samples that match the query; raise `UserError` if there is no run or no such sample."""
    _require_run(run_dir)
    with _readable(run_dir):
        groups = read_samples(run_dir)
    chosen = query.choose(groups)
    if not chosen:
        raise UserError(_nothing(run_dir, groups, query))
    _print(chosen, console, as_json=as_json)
    if not as_json:
        count = sum(len(group.answers) for group in groups)
        console.print(f"\n{len(chosen):,} of {count:,} answers kept in {run_dir / FOLDER}", style="dim", soft_wrap=True)


def follow_new(run_dir: Path, query: SampleQuery, console: Console, *, as_json: bool) -> None:
    """Print samples as they arrive until the run is over; raise `UserError` if there is no run."""
    _require_run(run_dir)
    reader, log = SampleReader(run_dir), EventFollower(run_dir / "events.jsonl")
    first, over = True, False
    while True:
        last = over  # read once more after the run's end: samples may be written late
        with suppress(OSError):
            for event in log.all():
                over = event["kind"] in ENDS
        limited = replace(query, limit=query.limit if first else None)
        with _readable(run_dir):
            groups = reader.new()
        _print(limited.choose(groups), console, as_json=as_json)
        first = False
        if last:
            return
        time.sleep(_FOLLOW_S)


def _require_run(run_dir: Path) -> None:
    if not (run_dir / "events.jsonl").is_file() and not (run_dir / FOLDER).is_dir():
        raise UserError(f"{run_dir} is not a run: it has neither events.jsonl nor {FOLDER}/")


@contextmanager
def _readable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the samples in {run_dir / FOLDER} cannot be read: {error.strerror}") from None


def _nothing(run_dir: Path, groups: list[SampleGroup], query: SampleQuery) -> str:
    if not groups:
        return (
            f"{run_dir / FOLDER} holds no samples: none was written yet, samples.log is off in its recipe, or another "
            "version of pipelinerl made the run"
        )
    of_kind = [group for group in groups if group.kind in query.kinds]
    kinds = ", ".join(sorted(query.kinds))
    if not of_kind:
        return f"{run_dir} has no {kinds} samples; it has {', '.join(sorted({group.kind for group in groups}))} ones"
    steps = sorted({group.step for group in of_kind})
    tags = sorted({tag for group in of_kind for tag in group.tags})
    return (
        f"none of the {kinds} samples in {run_dir} match; their steps are {steps[0]} to {steps[-1]}, their "
        f"domains {', '.join(sorted({visible(group.domain) for group in of_kind}))}"
        + (f", their tags {', '.join(visible(tag) for tag in tags[:20])}" if tags else "")
    )


def _print(chosen: Iterable[ChosenSample], console: Console, *, as_json: bool) -> None:
    if as_json:
        for group, answer in chosen:
            row = {name: value for name, value in msgspec.to_builtins(group).items() if name != "answers"}
            # Print only ASCII, so that model output cannot send control sequences to the terminal.
            console.out(json.dumps(row | msgspec.to_builtins(answer)).replace("\x7f", "\\u007f"), highlight=False)
        return
    for _, members in groupby(chosen, key=lambda each: id(each.group)):
        samples = list(members)
        for text in _head(samples[0].group):
            console.print(text, soft_wrap=True)
        for sample in samples:
            for text in _answer(sample.answer):
                console.print(text, soft_wrap=True)


def _head(group: SampleGroup) -> Iterable[Text]:
    kind = f"{group.kind.value} {group.evaluation}".strip()
    names = [f"step {group.step}", group.domain, *group.tags, kind]
    names += [group.why] if group.why else []
    names += [group.problem_id or group.group_id]
    yield Text(f"\n── {' · '.join(_line(name) for name in names)}", style="bold cyan")
    if group.filtered:
        counts = ", ".join(f"{count} {_line(why)}" for why, count in group.filtered.items())
        yield Text(f"   one of the groups filtered since the previous step: {counts}", style="dim")
    yield _indented("prompt  ", group.prompt, style="dim")
    if group.ground_truth:
        yield _indented("truth   ", group.ground_truth)


def _answer(answer: AnswerRecord) -> Iterable[Text]:
    style = _STYLES.get(answer.outcome, "yellow")
    facts = ["reward none" if answer.reward is None else f"reward {answer.reward:.3g}"]
    if answer.parts:
        facts[0] += " (" + ", ".join(f"{_line(name)} {reward:g}" for name, reward in answer.parts) + ")"
    if answer.shaped is not None and answer.shaped != answer.reward:
        facts.append(f"shaped {answer.shaped:.3g}")
    if answer.advantage is not None:
        facts.append(f"advantage {answer.advantage:+.3g}")
    facts.append(f"{answer.length:,} tokens, ended by {_line(answer.finish_reason)}")
    facts.append("versions " + (", ".join(f"v{version} × {tokens}" for version, tokens in answer.spans) or "unknown"))
    if answer.staleness is not None:
        facts.append(f"staleness {answer.staleness} (1 = on policy)")
    if answer.trained:
        facts.append("trained")
    yield Text.assemble(" ▸ ", (_line(answer.outcome), f"bold {style}"), " · " + " · ".join(facts))
    if answer.reason:
        yield _indented("reason  ", answer.reason, style="dim")
    if not answer.turns:
        yield _indented("answer  ", answer.text, style=style)
        return
    numbers = sorted({turn.segment for turn in answer.turns})
    several = len(numbers) > 1
    for number in numbers:
        turns = [(place, turn) for place, turn in enumerate(answer.turns, 1) if turn.segment == number]
        if several:
            first = turns[0][1]
            begin = f"continues turn {first.continues}" if first.continues else "begins a conversation"
            reason = f" ({_line(first.begins)})" if first.begins else ""
            yield Text(f"   segment {number} · {begin}{reason}", style="bold")
        for place, turn in turns:
            yield from _turn(place, turn, "     " if several else "   ", style)


def _turn(place: int, turn: TurnRecord, margin: str, style: str) -> Iterable[Text]:
    facts = [f"turn {place}", f"{turn.length:,} token{'s' * (turn.length != 1)}"]
    if turn.agent:
        facts.insert(1, _line(turn.agent))
    if turn.reward:
        facts.append(f"reward {turn.reward:g}")
    yield Text(f"{margin}{' · '.join(facts)}", style="dim")
    if turn.context:
        yield _indented("context ", turn.context, style="dim", margin=margin + "  ")
    yield _indented("answer  ", turn.text, style=style, margin=margin + "  ")


def _indented(label: str, text: str, *, style: str = "", margin: str = "   ") -> Text:
    lines = visible(shortened(text, _MOST)).split("\n")
    return Text.assemble(margin, (label, "dim"), (("\n" + " " * (len(margin) + len(label))).join(lines), style))


def _line(text: str) -> str:
    return one_line(shortened(text, 200))
