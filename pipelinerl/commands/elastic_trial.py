"""`pipelinerl engines elastic`: a dry run of the scaling rule on the figures of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.commands.recorded_run import recorded_events
from pipelinerl.config.recipe import load_run
from pipelinerl.config.sections import shared_values
from pipelinerl.controller.decisions.elastic import Want, changed, in_words, note_step, weighed
from pipelinerl.controller.state.elastic import ElasticMemory, ElasticRule
from pipelinerl.observability.events import Event


@dataclass(frozen=True, slots=True)
class TriedDecision:
    """A scaling decision that the rule would have made `elapsed_s` after the start of the run, when `step` was the
    latest step.
    """

    elapsed_s: float
    step: int
    engines: int
    wanted: int
    why: str


def show(run_dir: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line for each scaling decision of the recipe's `elastic` section, with `overrides` applied.

    Raises:
        UserError: there is no such run.
    """
    events = recorded_events(run_dir)
    config = load_run(run_dir, overrides)
    limits = config.elastic.types.values()
    least, most = sum(each.min for each in limits) or 1, sum(each.max for each in limits) or 4096
    rule = ElasticRule(**shared_values(config.elastic, ElasticRule))
    trials = list(decisions(events, rule, least=least, most=most))
    for each in trials:
        yield f"{each.elapsed_s:9.0f} s  step {each.step:6d}  {each.engines} → {each.wanted} engines: {each.why}"
    if trials:
        yield "only the first decision is reliable: it would have changed all later figures"
    else:
        agreeing = f"{rule.patience} intervals of {rule.interval_s:g} s in a row agree"
        yield f"no decision in {len(events)} events: no {agreeing}"


def decisions(events: Iterable[Event], rule: ElasticRule, *, least: int, most: int) -> Iterator[TriedDecision]:
    """Yield the decisions that `rule` would have made on a run's events. Decisions do not change the recorded number of
    engines.
    """
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
                figures = memory.taken(now=now, interval_s=rule.interval_s)
                if figures is None:
                    continue
                want = weighed(rule, memory, figures, engines=len(serving), now=now)
                wanted = len(serving) + want.value
                if want is not Want.SAME and least <= wanted <= most:
                    changed(memory, now=now)
                    yield TriedDecision(now, step, len(serving), wanted, in_words(want, figures))
