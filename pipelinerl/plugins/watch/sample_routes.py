"""Routes of samples and their tokens: `/api/samples`, `/api/samples/{group}`, `/api/tokens/{group}/{sample}`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import FastAPI, Path, Query
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.numerics.causes import Cause
from pipelinerl.observability.samples.record import AnswerRecord, AnswerTokens, SampleGroup, SampleKind, shortened
from pipelinerl.plugins.watch.page.sample_index import SampleFilter, SamplePlace, answers_of
from pipelinerl.plugins.watch.watched_run import Name, Pages, RunNumber, StepNumber, WatchedRun, answer
from pipelinerl.system.http_service import refusal

_BRIEF: Final = 200
#: Maximum number of characters shown of each prompt in a list of samples.
_PART: Final = 60
_WORD_AT_END: Final = re.compile(r"\w+\Z")
_WORD_AT_START: Final = re.compile(r"\A\w+")
_GONE: Final = (
    "this sample is not in the log, or was removed: samples.max_bytes limits the log, and the oldest go first"
)
_NO_TOKENS: Final = "no tokens were recorded for this sample: it is from an evaluation or an older run"

_Group = Annotated[str, Path(max_length=64)]


def add_samples(app: FastAPI, pages: Pages) -> None:
    """Add the routes of lists of samples, of one group, and of one sample's tokens."""

    @app.get("/api/samples")
    def samples(
        number: RunNumber = 0,
        kind: SampleKind | Literal["any"] = SampleKind.TRAINED,
        sort: Literal["time", "step", "reward", "advantage", "length", "staleness"] = "time",
        order: Literal["asc", "desc"] = "desc",
        domain: Name = None,
        tag: Name = None,
        step: StepNumber = None,
        step_to: StepNumber = None,
        signal: Literal["with", "without"] | None = None,  # of groups: whether their rewards differ
        evaluation: Annotated[str | None, Query(alias="set", max_length=500)] = None,
        finish: Name = None,
        outcome: Name = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        after: Annotated[str, Query(max_length=100)] = "",
    ) -> Response:
        criteria = SampleFilter(
            kind=None if kind == "any" else kind,
            domain=domain or None,
            tag=tag or None,
            step=step,
            step_to=step_to,
            evaluation=evaluation or None,
            finish_reason=finish or None,
            outcome=outcome or None,
            signal=None if signal is None else signal == "with",
            sort=sort,
            descending=order == "desc",
            limit=limit,
            after=_place(after),
        )
        run = pages.of(number)
        with run.lock:
            choice = run.samples.choose(criteria)
            members = list(answers_of(choice, run.samples))
            complete = not run.samples.unread_bytes
        rest = None if choice.after is None else "{!r}:{:016x}:{}".format(*choice.after)
        prompts: dict[str, list[str]] = {}
        for _, each in members:
            prompts.setdefault(each.domain, []).append(each.prompt)
        parts = {domain: dict(zip(of, differing_parts(of, _PART), strict=True)) for domain, of in prompts.items()}
        rows = [_row(place, each) | {"prompt_part": parts[each.domain][each.prompt]} for place, each in members]
        return answer({"complete": complete, "matched": choice.matched, "after": rest, "samples": rows})

    @app.get("/api/samples/{group}")
    def side_by_side(group: _Group, number: RunNumber = 0) -> Response:
        stored, signal = _group(pages.of(number), group)
        if stored is None:
            return refusal(404, _GONE, code="sample_gone", param="group")
        fields = msgspec.to_builtins(msgspec.structs.replace(stored, prompt_tokens=None, answers=()))
        answers = [_answer(at, each) for at, each in enumerate(stored.answers)]
        whole = {"tags": [], "problem_id": "", "ground_truth": "", "why": "", "evaluation": "", "filtered": {}}
        return answer({**whole, **fields, "group": group, "signal": signal, "answers": answers})

    @app.get("/api/tokens/{group}/{sample}")
    def tokens(group: _Group, sample: Annotated[int, Path(ge=0, le=2**20)], number: RunNumber = 0) -> Response:
        stored, _ = _group(pages.of(number), group)
        if stored is None or sample >= len(stored.answers):
            return refusal(404, _GONE, code="sample_gone", param="group")
        columns = stored.answers[sample].tokens
        if columns is None:
            return refusal(404, _NO_TOKENS, code="no_tokens")
        return answer({"group": group, "sample": sample, "step": stored.step, **_columns(stored, sample, columns)})


def _group(run: WatchedRun, name: str) -> tuple[SampleGroup | None, bool]:
    with run.lock:
        stored = run.samples.group(name)
        return stored, stored is not None and run.samples.has_signal(name)


def _place(after: str) -> tuple[float, int, int] | None:
    if not after:
        return None
    try:
        value, key, number = after.split(":")
        place = float(value), int(key, 16), int(number)
    except ValueError:
        place = math.nan, 0, 0
    if math.isnan(place[0]) or not 0 <= place[1] < 2**64 or not 0 <= place[2] < 2**31:
        raise HTTPException(422, "after must be the `after` of an earlier response")
    return place


def _row(place: SamplePlace, group: SampleGroup) -> dict[str, Any]:
    each = group.answers[place.number]
    return {
        "group": place.name,
        "kind": group.kind,
        "step": group.step,
        "time": group.time,
        "domain": group.domain,
        "tags": group.tags,
        "problem_id": group.problem_id,
        "signal": place.signal,
        "prompt": shortened(group.prompt, _BRIEF),
        **_answer(place.number, each),
        "text": shortened(each.text, _BRIEF),
        "versions": each.spans,
    }


def differing_parts(texts: Sequence[str], most: int) -> list[str]:
    """Return each text without the words that all texts share at start and end, cut to about `most` characters.

    If all texts are equal, their end is returned, because prompts usually end with the question.
    """
    if len(set(texts)) < 2:
        return [text if len(text) <= most else f"… {text[-most:]}" for text in texts]
    begin = _WORD_AT_END.sub("", _shared_start(texts))
    rests = [text[len(begin) :] for text in texts]
    end = _WORD_AT_START.sub("", _shared_start([rest[::-1] for rest in rests])[::-1])
    parts = [shortened(rest[: len(rest) - len(end)].strip(), most) for rest in rests]
    return [f"{'… ' if begin.strip() else ''}{part}{' …' if end.strip() else ''}" for part in parts]


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    return first[: next((at for at, each in enumerate(first) if last[at : at + 1] != each), len(first))]


def _answer(number: int, each: AnswerRecord) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in each.__struct_fields__ if name != "tokens"}
    turns = [msgspec.structs.asdict(turn) for turn in each.turns]
    return {"sample": number, **fields, "turns": turns, "has_tokens": each.tokens is not None}


def _columns(group: SampleGroup, number: int, answer: AnswerTokens) -> dict[str, Any]:
    """Return lists (ids, texts, log-probs, …) with one entry per token: the prompt's tokens, then the answer's."""
    prompt, tokens = group.prompt_tokens, answer.tokens
    ids = [*(prompt.ids if prompt else ()), *tokens.ids]
    texts = [*(prompt.texts if prompt else ()), *tokens.texts]
    before = len(ids) - len(tokens.ids)
    trained, held = group.answers[number].trained, group.step - 1

    def column(values: tuple[Any, ...]) -> list[Any] | None:
        return [None] * before + list(values) if values else None

    sampled = [False] * before + [version is not None for version in answer.versions]
    deltas = column(answer.deltas)
    logprobs = column(answer.logprobs)
    ours = [None if a is None or b is None else a + b for a, b in zip(logprobs or (), deltas or (), strict=False)]
    left_out = [each for each in (prompt, tokens) if each is not None and each.left_out]
    return {
        "held_version": held,
        "count": len(ids),
        "prompt": before,
        "left_out": sum(each.left_out for each in left_out),
        "left_out_at": None if not left_out else left_out[0].at + (before if left_out[0] is tokens else 0),
        "id": ids,
        "text": texts,
        "sampled": sampled,
        "mask": [each and trained for each in sampled],
        "version": column(answer.versions),
        "logprob": logprobs,
        "trainer_logprob": ours or None,
        "delta": deltas,
        "cause": column(causes_of(answer.versions, held=held)) if deltas else None,
        "advantage": column(answer.advantages),
        "entropy": column(answer.entropies),
        "special": None,
    }


def causes_of(versions: tuple[int | None, ...], *, held: int) -> tuple[Cause | None, ...]:
    """Return for each token why the trainer's log-prob differs from the sampler's; None for tokens not sampled.

    As in `numerics.causes`, the cause depends on the version that sampled the token, the version that sampled the first
    token of its turn, and the version `held` by the trainer.
    """
    causes: list[Cause | None] = []
    first: int | None = None
    for version in versions:
        if version is None:
            causes.append(None)
            first = None
            continue
        first = version if first is None else first
        own = Cause.NUMERICS if first == held else Cause.CACHE
        causes.append(own if version == held else Cause.STALENESS)
    return tuple(causes)
