"""A run in which every text that the live page shows is a cross-site scripting attack: 200 ways to call `pwned(i)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pipelinerl.observability.events import EventLog
from pipelinerl.observability.samples import AnswerTokens, TokenTexts
from tests.observability.groups import answer, group
from tests.plugins.watch.run_files import keep, written_run

_WAYS: Final = (
    "<script>pwned({i})</script>",
    "<img src=x onerror=pwned({i})>",
    "<svg onload=pwned({i})>",
    '"><script>pwned({i})</script>',
    "' onmouseover='pwned({i})",
    "javascript:pwned({i})",
    "<iframe srcdoc='<script>parent.pwned({i})</script>'>",
    "</textarea><script>pwned({i})</script>",
    "</title><script>pwned({i})</script>",
    "<a href=javascript:pwned({i}) autofocus>x</a>",
    "<details open ontoggle=pwned({i})>",
    "<math><mtext><style><img src onerror=pwned({i})>",
    "${{pwned({i})}}",
    "{{{{constructor.constructor('pwned({i})')()}}}}",
    "<input autofocus onfocus=pwned({i})>",
    "<style>@import 'http://evil.invalid/{i}'</style>",
    "<link rel=stylesheet href=//evil.invalid/{i}>",
    "<object data=javascript:pwned({i})>",
    "data:text/html,<script>pwned({i})</script>",
    "<base href=//evil.invalid/{i}/>",
)
_BEFORE: Final = ("", "</div>", "-->", "]]>", "\u202e", "\x00", "&lt;", "`", "<!--", "\u2028")

#: The attack texts: each way to run code in a page, combined with each prefix.
HOSTILE: Final = tuple(
    f"{before}{way.format(i=number)}"
    for number, (before, way) in enumerate((before, way) for before in _BEFORE for way in _WAYS)
)


def hostile_run(run_dir: Path) -> Path:
    """Write a run whose names, domains, tags, prompts, answers, tokens, reasons, knobs and recipe are attack texts."""
    written_run(run_dir, steps=2, end=False)
    texts = iter(HOSTILE * 2)
    domain, tag = next(texts), next(texts)
    figures = {"rollouts": 8.0, "groups": 1.0, "reward": 0.5, "accuracy": 0.5, "length_mean": 3.0, "stale_groups": 1.0}
    with EventLog(run_dir / "events.jsonl") as log:
        log.write("run_started", elapsed_s=5.0, run=next(texts), total_steps=9)
        log.write("engine_joined", elapsed_s=5.1, url=next(texts), name=next(texts))
        shares = {"by_domain": {domain: figures}, "by_tag": {tag: figures}}
        log.write("step", elapsed_s=6.0, step=3, model_version=3, reward=0.5, rollouts=8, orders=[3], **shares)
        log.write("evaluation", elapsed_s=6.5, name=next(texts), model_version=3, accuracy=0.5, low=0.4, high=0.6)
        log.write("knobs", elapsed_s=7.0, step=3, who=next(texts), changes={"k": 3, next(texts): next(texts)})
        log.write("alarm", elapsed_s=7.1, step=3, alarm=next(texts), domain=domain, what=next(texts))
        log.write("engine_lost", elapsed_s=7.2, url=next(texts), reason=next(texts))
        log.write("run_failed", elapsed_s=8.0, reason=next(texts))
    with (run_dir / "recipe.toml").open("a") as recipe:
        recipe.write(f"\n[hostile]\n{json.dumps(next(texts))} = {json.dumps(next(texts))}\n")
    ids = tuple(range(len(HOSTILE)))
    tokens = AnswerTokens(tokens=TokenTexts(ids=ids, texts=HOSTILE), versions=(2,) * len(ids))
    answers = [answer(text, reason=text, outcome=text, parts=((text, 1.0),)) for text in HOSTILE[1:8]]
    fields = {"domain": domain, "tags": (tag,), "prompt": HOSTILE[9], "problem_id": HOSTILE[10], "why": HOSTILE[11]}
    first = answer(HOSTILE[0], tokens=tokens, trained=True)
    keep(run_dir, [group(3, first, *answers, **fields, ground_truth=HOSTILE[12])], name="training2")
    return run_dir


def long_silent(run_dir: Path) -> Path:
    """Make every event a minute older, because the live page regards a run with a recent event as still running."""
    log = run_dir / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(event | {"time": event["time"] - 60.0}) + "\n" for event in events))
    return run_dir
