"""The directory of a synthetic run, written by the real writers, and its page served over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pipelinerl.config import recipe as recipes
from pipelinerl.controller.service.api import create_api
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.samples import AnswerTokens, SampleGroup, SampleKind, SampleLog, TokenTexts, TurnRecord
from pipelinerl.plugins.watch.access import PageLinks
from pipelinerl.plugins.watch.server import create_page
from pipelinerl.plugins.watch.watched_run import WatchedRun, watched_runs
from pipelinerl.system.http_service import listen, serve_until, url_of
from tests.controller.service.test_service import Running, running
from tests.fakes.served import in_thread
from tests.observability.groups import answer, group
from tests.observability.synthetic import events
from tests.patience import PATIENCE_S

TOKEN = "page-token"


def written_run(run_dir: Path, *, steps: int = 40, end: bool = True, overrides: Sequence[str] = ()) -> Path:
    """Write a run of `steps` steps, finished or killed, with samples of each step."""
    run_dir.mkdir(parents=True)
    config = recipes.load("tiny", overrides)
    recipes.save(config, run_dir / "recipe.toml")
    recipes.write_layout(run_dir)
    with EventLog(run_dir / "events.jsonl") as log:
        for event in events(steps):
            if end or event["kind"] != "run_finished":
                write(log, event)
    keep(run_dir, [sampled(step) for step in range(1, steps + 1)])
    return run_dir


def write(log: EventLog, event: dict[str, Any]) -> None:
    """Write an event of `synthetic.events`; step events also get metrics by domain and by token age."""
    fields = {name: value for name, value in event.items() if name not in ("time", "kind")}
    if event["kind"] == "step":
        fields |= {"by_domain": by_domain(event), "age_1_share": 0.75, "age_3_4_share": 0.25, "orders": [event["step"]]}
    log.write(event["kind"], **fields)


def by_domain(event: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return metrics of an easy domain, whose rollouts are episodes with tools, and of a hard domain."""
    figures = {"rollouts": 128.0, "groups": 16.0, "length_mean": 6.0, "stale_groups": 1.0, "truncated": 0.0}
    easy = {"reward": event["reward"], "accuracy": event["reward"]}
    calls = {"calls_parsed": 40.0, "tool_errors": 3.0, "calls_malformed": 1.0}
    easy |= {"turns": 2.5, "segments": 1.5, "episodes": 64.0, "environment_s": 0.25, **calls}
    return {"short_words": figures | easy, "long_words": figures | {"reward": 0.0, "accuracy": 0.0}}


def sampled(step: int, **fields: Any) -> SampleGroup:
    """Return a group of two answers: a correct one with values for each token, and a wrong one without tokens."""
    tokens = AnswerTokens(
        tokens=TokenTexts(ids=(7, 8, 9), texts=("a", "b", "<eos>")),
        versions=(step - 2, None, step - 1),
        logprobs=(-0.5, None, -0.25),
        deltas=(0.25, None, -0.5),
        advantages=(1.0, None, 1.0),
        entropies=(0.75, None, 0.125) if step % 2 else (),
    )
    right = answer("right", reward=1.0, advantage=1.0, length=3 + step % 5, trained=True, tokens=tokens)
    wrong = answer("wrong", reward=0.0 if step % 2 else 1.0, advantage=-1.0, length=2, staleness=step % 3)
    given = {"prompt_tokens": TokenTexts(ids=(1, 2), texts=("<bos>", "say")), "tags": ("easy",) if step % 2 else ()}
    return group(step, right, wrong, **given | fields)


def of_episode(step: int) -> SampleGroup:
    """Return a group with one episode: two turns of the main agent, a fork of the first, and a turn of a sub-agent."""
    turns = (
        TurnRecord(text="let me look", agent="main", length=4, begins="first"),
        TurnRecord(text="it is b", agent="main", length=3, context="the tool says b", reward=1.0, continues=1),
        TurnRecord(text="or c", agent="main", length=2, context="try again", segment=2, begins="forked", continues=1),
        TurnRecord(text="a plan", agent="planner", length=2, context="plan it", segment=3, begins="first"),
    )
    return group(step, answer("let me look", turns=turns), group_id=f"episode-{step}")


def keep(run_dir: Path, groups: list[SampleGroup], *, name: str = "training") -> None:
    log = SampleLog(run_dir / "samples", name, max_bytes=2**24)
    log.put(lambda: groups)
    log.close(timeout_s=PATIENCE_S)
    assert log.left_out == 0


def of_evaluation(step: int) -> SampleGroup:
    return sampled(step, kind=SampleKind.EVALUATION, evaluation="held_out", group_id=f"eval-{step}")


@asynccontextmanager
async def served_controller(
    run_dir: Path, directory: Path, **options: Any
) -> AsyncIterator[tuple[Running, Callable[[], None]]]:
    """Serve a real controller, with its files in `directory`, as that of the run; yield it and a function that ends it.

    The domains in the run's recipe are renamed to the controller's, `a` and `b`.
    """
    recipe = (run_dir / "recipe.toml").read_text()
    (run_dir / "recipe.toml").write_text(recipe.replace('"short_words"', '"a"').replace('"long_words"', '"b"'))
    async with running(directory, **options) as run:
        await run.start()
        ended = asyncio.Event()
        over, listener = asyncio.ensure_future(ended.wait()), listen("127.0.0.1", 0)
        serving = asyncio.create_task(serve_until(create_api(run.service, token="secret"), listener, over=over))
        address = url_of(*listener.getsockname()[:2])
        (run_dir / "controller.json").write_text(json.dumps({"url": address, "token": "secret"}))
        try:
            yield run, ended.set
        finally:
            ended.set()
            await asyncio.wait_for(serving, PATIENCE_S)


@dataclass
class ServedPage:
    """The page of `pipelinerl watch` behind real HTTP, with an HTTP client and the watched runs."""

    url: str
    keys: list[str]
    http: httpx.Client
    runs: list[WatchedRun] = field(default_factory=list)

    def get(self, path: str, **query: Any) -> Any:
        answered = self.http.get(path, params=query)
        assert answered.status_code == 200, answered.text
        return answered.json()


@contextmanager
def served_page(*run_dirs: Path, read_only: bool = False, share_key: str = "") -> Iterator[ServedPage]:
    """Serve the page of the runs in `run_dirs`, and yield it with an HTTP client that has the login cookie."""
    keys: list[str] = []
    links, runs = PageLinks(keys.append), watched_runs(run_dirs, read_only=read_only)
    links.offer()
    app = create_page(runs, token=TOKEN, links=links, share_key=share_key)
    with in_thread(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
        http.cookies.set("pipelinerl", TOKEN)
        yield ServedPage(url, keys, http, runs)


def loaded(page: ServedPage, run: int = 0) -> Any:
    """Wait until the page has read all files of the run; return the response to `/api/run`."""
    while True:  # the time limit of the test ends this loop at the latest
        shown = page.get("/api/run", run=run)
        if shown["loading"] == {"events": 1.0, "samples": 1.0} and page.runs[run].loaded == {"events", "samples"}:
            return shown


def link_in(text: str) -> str:
    """Return the newest link that `pipelinerl watch` has printed."""
    return re.findall(r"watch at (http://\S+)", text)[-1]
