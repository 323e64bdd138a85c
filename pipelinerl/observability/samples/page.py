"""Samples in the report: the best and worst answers of the last steps, and the worst of the last evaluation.

Texts of models, verifiers and data sets are untrusted: they are shortened, their invisible characters are shown as
escapes, and HTML is escaped, in this order. They are placed only in elements that hold text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from pipelinerl.observability.samples.reading import ChosenSample, Ranking, SampleQuery
from pipelinerl.observability.samples.record import AnswerRecord, SampleGroup, SampleKind, shortened, visible

#: Number of steps from which the report chooses samples: the last ones that have any.
_STEPS: Final = 5
_SHOWN: Final = 4
_MOST: Final = 1500


def samples_section(groups: Sequence[SampleGroup]) -> str:
    """Return the HTML of the report's section on samples."""
    trained = _last_steps(groups, SampleKind.TRAINED, _STEPS)
    filtered = _last_steps(groups, SampleKind.FILTERED, 1)
    parts = [
        _part("Best of the last steps", _ranked(trained, SampleKind.TRAINED, Ranking.BEST)),
        _part("Worst of the last steps", _ranked(trained, SampleKind.TRAINED, Ranking.WORST)),
        *_evaluations(groups),
        _part("Filtered, never trained", _ranked(filtered, SampleKind.FILTERED, Ranking.NEWEST)),
    ]
    return "".join(parts) or "<p class=none>No samples were kept.</p>"


def _evaluations(groups: Sequence[SampleGroup]) -> Iterator[str]:
    sets = sorted({group.evaluation for group in groups if group.kind is SampleKind.EVALUATION})
    for name in sets:
        of_set = _last_steps([group for group in groups if group.evaluation == name], SampleKind.EVALUATION, 1)
        title = "Worst of the last evaluation" + (f", {name}" if len(sets) > 1 else "")
        yield _part(title, _ranked(of_set, SampleKind.EVALUATION, Ranking.WORST))


def _last_steps(groups: Sequence[SampleGroup], kind: SampleKind, steps: int) -> list[SampleGroup]:
    kept = sorted({group.step for group in groups if group.kind is kind})[-steps:]
    return [group for group in groups if group.kind is kind and group.step in kept]


def _ranked(groups: Sequence[SampleGroup], kind: SampleKind, ranking: Ranking) -> list[ChosenSample]:
    return SampleQuery(kinds=frozenset((kind,)), ranking=ranking, limit=_SHOWN).choose(groups)


def _part(title: str, chosen: Sequence[ChosenSample]) -> str:
    if not chosen:
        return ""
    return f"<h3>{escape(title)}</h3>" + "".join(_sample(*each) for each in chosen)


def _sample(group: SampleGroup, answer: AnswerRecord) -> str:
    facts = [f"step {group.step}", group.domain, *group.tags, group.why, answer.outcome]
    facts.append("" if answer.reward is None else f"reward {answer.reward:.3g}")
    facts.append("" if answer.advantage is None else f"advantage {answer.advantage:+.3g}")
    facts.append(f"{answer.length:,} tokens, ended by {answer.finish_reason}")
    facts.append(", ".join(f"v{version} × {tokens}" for version, tokens in answer.spans))
    head = " · ".join(_inert(fact, 200) for fact in facts if fact)
    texts = (
        ("prompt", group.prompt),
        ("truth", group.ground_truth),
        ("reason", answer.reason),
        ("answer", answer.text),
    )
    body = "".join(f"<dt>{name}</dt><dd>{_inert(text, _MOST)}</dd>" for name, text in texts if text)
    return f"<details class=sample open><summary>{head}</summary><dl>{body}</dl></details>"


def _inert(text: str, most: int) -> str:
    return escape(visible(shortened(text, most)))
