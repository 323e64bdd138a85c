"""`pipelinerl engines elastic`: a dry run, on recorded metrics, of the rule that scales the number of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipelinerl.commands.remote import recorded_events
from pipelinerl.config.recipe import load_run
from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.decisions.elastic import Want, in_words, next_change, note_change, note_step
from pipelinerl.controller.state.run_state import ElasticMemory
from pipelinerl.observability.events import Event


def elastic_decisions(run_dir: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line for each decision that the recipe's `elastic` section would have caused, then a closing remark.

    The `overrides` change the recipe first.

    Raises:
        UserError: there is no such run, or the overrides are invalid.
    """
    events = recorded_events(run_dir)
    config = load_run(run_dir, overrides)
    limits = config.elastic.types.values()
    least, most = sum(each.min for each in limits) or 1, sum(each.max for each in limits) or 4096
    rule = config.elastic
    decisions = list(_decisions(events, rule, least=least, most=most))
    yield from decisions
    if decisions:
        yield "only the first decision is reliable: it would have changed all later figures"
    else:
        agreeing = f"{rule.patience} intervals of {rule.interval_s:g} s in a row agree"
        yield f"no decision in {len(events)} events: no {agreeing}"


def _decisions(events: Iterable[Event], rule: ElasticSection, *, least: int, most: int) -> Iterator[str]:
    """Yield a line for each decision that `rule` would have made, each from the recorded number of engines."""
    memory, serving, step = ElasticMemory(), set[str](), 0
    for event in events:
        now = float(event.get("elapsed_s", 0.0))
        match event["kind"]:
            case "engine_verified" | "engine_back":
                serving.add(event["url"])
            case "engine_lost" | "engine_suspect" | "engine_draining":
                serving.discard(event["url"])
            case "engine_joined" | "evaluation_began" | "controller_returned" | "trainer_ready":
                memory.forget()
            case "step":
                step = int(event["step"])
                note_step(memory, event, event.get("by_domain", {}))
            case "engines" if serving:
                memory.note_poll(float(event["occupancy"]), now=now)
                figures = memory.end_interval(now=now, interval_s=rule.interval_s)
                if figures is None:
                    continue
                engines = len(serving)
                want = next_change(rule, memory, figures, engines=engines, now=now)
                wanted = engines + want.value
                if want is not Want.SAME and least <= wanted <= most:
                    note_change(memory, now=now)
                    why = in_words(want, figures)
                    yield f"{now:9.0f} s  step {step:6d}  {engines} → {wanted} engines: {why}"
