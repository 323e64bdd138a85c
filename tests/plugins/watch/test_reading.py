"""The page's API for finished, crashed, copied and resumed runs: steps, samples, tokens and the event stream."""

import json
import shutil

import pytest

from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.usage import Usage, write_usage
from pipelinerl.plugins.watch.read_routes import differing_parts
from pipelinerl.plugins.watch.watched_run import watched_runs
from tests.observability.synthetic import events
from tests.plugins.watch.run_files import keep, loaded, of_evaluation, sampled, served_page, write, written_run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    finished = written_run(folder / "one", steps=40)
    keep(finished, [of_evaluation(3)], name="evaluation")
    crashed = written_run(folder / "two", steps=20, end=False)
    text = (crashed / "recipe.toml").read_text()
    (crashed / "recipe.toml").write_text(text.replace('name = "tiny"', 'name = "two"', 1))
    with (crashed / "events.jsonl").open("ab") as file:
        file.write(b'{"time":1.0,"kind":"ste')
    with served_page(finished, shutil.copytree(crashed, folder / "copy")) as served:
        loaded(served)
        loaded(served, run=1)
        yield served


def test_page_shows_a_finished_run_and_a_copy_of_a_crashed_run(page):
    response = page.get("/api/run")
    assert (response["name"], response["state"], response["step"], response["reason"]) == (
        "tiny",
        "finished",
        40,
        "all steps taken",
    )
    assert not response["may_steer"] and response["why_not"] == "the run is over"
    assert response["recipe"]["run"]["name"] == "tiny" and "domain/short_words/accuracy" in response["metrics"]
    assert response["kinds"] == ["trained", "evaluation"] and response["samples"] == 82 and response["evaluation_sets"]
    assert {"short_words", "long_words"} <= set(response["domains"]) and response["tags"] == ["easy"]
    copy = page.get("/api/run", run=1)
    assert (copy["step"], copy["loading"]) == (20, {"events": 1.0, "samples": 1.0})
    assert copy["state"] in ("starting", "crashed"), "its newest event is seconds old"
    assert [each["run"] for each in copy["runs"]] == [0, 1]
    assert page.http.get("/api/run", params={"run": 2}).status_code == 404


def test_page_returns_step_metrics_at_each_step_or_merged_into_fewer_points(page):
    whole = page.get("/api/steps", metrics="reward,domain/long_words/reward,none", points=40)
    assert whole["each"] == 1 and whole["x"]["step"] == list(range(1, 41)) and whole["complete"]
    assert list(whole["y"]) == ["reward", "domain/long_words/reward"] and set(whole["y"]["reward"]) == {"mean"}
    assert whole["x"]["samples"][-1] == 40 * 256 and whole["x"]["tokens"][-1] == 40 * 8200
    merged = page.get("/api/steps", metrics="reward", points=10, **{"from": 21, "to": 40})
    assert merged["each"] == 2 and merged["x"]["step"] == list(range(22, 41, 2))
    rewards, column = whole["y"]["reward"]["mean"], merged["y"]["reward"]
    assert column["low"] == [min(rewards[at : at + 2]) for at in range(20, 40, 2)]
    assert column["high"] == [max(rewards[at : at + 2]) for at in range(20, 40, 2)]
    assert page.get("/api/steps", since=38)["x"]["step"] == [39, 40]
    kinds = {mark["kind"] for mark in whole["marks"]}
    assert {"knobs", "evaluation", "engine_joined", "engine_lost"} <= kinds
    assert page.http.get("/api/steps", params={"points": 1}).status_code == 422


def test_live_view_returns_confidence_intervals_token_ages_and_the_trainers_causes_of_waiting(page):
    now = page.get("/api/now", window=20)
    easy, hard = sorted(now["domains"], key=lambda each: each["name"], reverse=True)
    assert easy["reward"]["low"] < easy["reward"]["mean"] < easy["reward"]["high"]
    assert hard["accuracy"] == {"mean": 0.0, "low": 0.0, "high": 0.0} and easy["stale"] == pytest.approx(1 / 17)
    assert now["staleness"] == [{"age": "1", "share": 0.75}, {"age": "3_4", "share": 0.25}]
    assert now["stale"]["groups"] == 40 and now["mismatch"][0]["cause"] == "numerics"
    assert sum(each["share"] for each in now["waits"][:2]) == pytest.approx(1.0)
    assert now["held_out"][0]["accuracy"] is not None and now["fleet"]["engines"][0]["state"] == "lost"
    assert any(each["kind"] == "engine_lost" for each in now["incidents"])


def test_live_view_returns_only_the_steps_and_event_marks_that_the_browser_does_not_have_yet(page):
    names = "reward,domain/long_words/reward"
    whole = page.get("/api/now", metrics=names)["steps"]
    assert whole == page.get("/api/steps", metrics=names) and whole["last"] == 40
    assert whole["figures"] == len(page.get("/api/run")["metrics"]) and whole["marked"] == len(whole["marks"]) > 4
    later = page.get("/api/now", metrics=names, since=38, marked=whole["marked"] - 1)["steps"]
    assert later["x"]["step"] == [39, 40] and later["marks"] == whole["marks"][-1:]
    assert later["y"] == {name: {"mean": whole["y"][name]["mean"][-2:]} for name in names.split(",")}
    nothing = page.get("/api/now", metrics=names, since=40, marked=whole["marked"])["steps"]
    assert nothing["x"]["step"] == [] and nothing["marks"] == [] and nothing["last"] == 40
    assert "steps" not in page.get("/api/now")
    for wrong in ({"since": -1}, {"marked": "x"}, {"points": 1}):
        assert page.http.get("/api/now", params={"metrics": "reward", **wrong}).status_code == 422, wrong


def test_page_sorts_filters_and_paginates_samples(page):
    first = page.get("/api/samples", sort="length", limit=30)
    assert first["matched"] == 80 and first["complete"] and first["samples"][0]["length"] == 7
    seen = [(each["group"], each["sample"]) for each in first["samples"]]
    while first["after"] is not None:
        first = page.get("/api/samples", sort="length", limit=30, after=first["after"])
        seen += [(each["group"], each["sample"]) for each in first["samples"]]
    assert len(seen) == len(set(seen)) == 80
    assert page.get("/api/samples", tag="easy")["matched"] == 40
    assert page.get("/api/samples", signal="without")["matched"] == 40
    assert page.get("/api/samples", outcome="wrong", order="asc", sort="step")["samples"][0]["step"] == 1
    assert page.get("/api/samples", step=5, step_to=7)["matched"] == 6
    assert page.get("/api/samples", kind="evaluation", set="held_out")["matched"] == 2
    assert page.get("/api/samples", domain="nobody")["matched"] == 0
    for wrong in ({"after": "x"}, {"after": "nan:0:0"}, {"sort": "x"}, {"limit": 0}, {"step": -1}):
        assert page.http.get("/api/samples", params=wrong).status_code == 422, wrong


def test_page_returns_a_sampled_group_and_its_tokens(page):
    row = page.get("/api/samples", sort="step", order="asc", outcome="correct", limit=1)["samples"][0]
    group = page.get(f"/api/samples/{row['group']}")
    assert (group["step"], group["signal"], group["tags"]) == (1, True, ["easy"])
    assert [(each["text"], each["has_tokens"]) for each in group["answers"]] == [("right", True), ("wrong", False)]
    tokens = page.get(f"/api/tokens/{row['group']}/0")
    assert tokens["id"] == [1, 2, 7, 8, 9] and tokens["text"] == ["<bos>", "say", "a", "b", "<eos>"]
    assert tokens["sampled"] == tokens["mask"] == [False, False, True, False, True]
    assert tokens["version"] == [None, None, -1, None, 0] and tokens["held_version"] == 0
    assert tokens["cause"] == [None, None, "staleness", None, "numerics"]
    assert tokens["trainer_logprob"] == [None, None, -0.25, None, -0.75]
    assert tokens["entropy"] == [None, None, 0.75, None, 0.125]
    later = page.get("/api/samples", step=2, outcome="correct")["samples"][0]
    assert page.get(f"/api/tokens/{later['group']}/0")["entropy"] is None, "it was not measured"
    assert page.http.get(f"/api/tokens/{row['group']}/1").json()["error"]["code"] == "no_tokens"
    for gone in ("0" * 16, "x", "0", "9" * 30, "-1", "f" * 16):
        assert page.http.get(f"/api/samples/{gone}").json()["error"]["code"] == "sample_gone"


def test_comparison_has_held_out_curves_on_each_axis_and_the_time_used_by_role(page):
    write_usage(page.runs[0].run_dir, "engine-0", Usage(60.0, 30.0))
    write_usage(page.runs[0].run_dir, "engine-1", Usage(40.0, 0.0))
    by_step = page.get("/api/compare", runs="0", x="step")["runs"][0]
    curve = by_step["held_out"]["held_out"]
    assert len(curve["x"]) == len(curve["y"]) > 1 and all(0 <= each <= 1 for each in curve["y"])
    by_samples = page.get("/api/compare", runs="0", x="samples")["runs"][0]["held_out"]["held_out"]
    assert by_samples["x"] == pytest.approx([256 * step for step in curve["x"]])
    seconds = page.get("/api/compare", runs="0", x="seconds")["runs"][0]["held_out"]["held_out"]["x"]
    assert seconds == sorted(seconds)
    assert by_step["usage"] == {"engine": {"cpu_s": 100.0, "gpu_s": 30.0}} and by_step["step"] == 40


def test_recipe_is_listed_by_key_and_says_which_settings_were_made(page):
    rows = {row["path"]: row for row in page.get("/api/recipe")["rows"]}
    assert rows["domains.long_words.source"] == {
        "path": "domains.long_words.source",
        "value": "reasoning_gym:spell_backward",
        "made": True,
    }
    assert any(not row["made"] for row in rows.values())


def test_incident_of_a_lost_engine_names_its_log_and_a_changed_knob_is_an_incident(tmp_path):
    run_dir = written_run(tmp_path / "run", steps=3, end=False)
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "engine-3.log").touch()
    with EventLog(run_dir / "events.jsonl") as log:
        log.write("engine_joined", url="http://e:1", name="engine-3")
        log.write("engine_lost", url="http://e:1", reason="no answer")
        log.write("knobs", changes={"k": 3, "domain_weights": {"sums": 2.0}}, who="ada", step=3)
    with served_page(run_dir) as served:
        loaded(served)
        incidents = served.get("/api/now")["incidents"]
    (lost,) = [each for each in incidents if each["what"].startswith("http://e:1")]
    (changed,) = [each for each in incidents if each["kind"] == "knobs"]
    assert lost["what"] == f"http://e:1: no answer; its log: {run_dir / 'logs' / 'engine-3.log'}"
    assert (changed["kind"], changed["what"]) == ("knobs", "k = 3, domain_weights.sums = 2.0 by ada")


def test_page_compares_runs_over_a_common_x_axis(page):
    response = page.get("/api/compare", runs="0,1", metrics="reward", x="samples", points=10)
    assert [len(run["x"]) for run in response["runs"]] == [10, 10] and response["runs"][0]["x"][-1] == 40 * 256
    assert [len(run["x_of"]["reward"]) for run in response["runs"]] == [10, 10]
    assert response["runs"][0]["x_of"]["reward"][-1] < 40 * 256, "older weights sampled the last batch"
    assert {"path": "run.name", "values": ["tiny", "two"]} in response["differences"]
    assert page.http.get("/api/compare", params={"runs": "0,x"}).status_code == 422


def test_listed_prompts_are_shortened_to_the_parts_in_which_they_differ():
    head, tail = "Answer in JSON.\nSpell this backward: ", "\nThink first."
    texts = [head + word + tail for word in ("stone", "storm", "a cat")]
    assert differing_parts(texts, 200) == ["… stone …", "… storm …", "… a cat …"]
    assert differing_parts(["one", "one two"], 200) == ["one", "one two"]
    chats = [f"<|user|>{word}<|end|>" for word in ("stone", "tone")]
    assert differing_parts(chats, 200) == ["… stone …", "… tone …"], "words are not cut"
    assert differing_parts(["say hello", "say hello\nagain"], 200) == ["… hello", "… hello\nagain"]
    assert differing_parts(["x" * 300 + "the question"], 20) == ["… " + "x" * 8 + "the question"]
    assert differing_parts([], 20) == []


def test_settings_at_their_defaults_are_not_listed_as_differences(tmp_path):
    one = written_run(tmp_path / "one", steps=1, overrides=["engine.count=2"])
    two = written_run(tmp_path / "two", steps=1, overrides=["staleness.j=2"])
    text = (two / "recipe.toml").read_text()
    text = text.replace("stall_s = 120.0\n", "")  # a recipe saved before this setting existed lacks its line
    (two / "recipe.toml").write_text(text.replace('name = "long_words"', 'name = "other_words"'))
    with served_page(one, two) as page:
        values = {each["path"]: each["values"] for each in page.get("/api/compare")["differences"]}
    assert values["engine.count"] == [2, 1] and values["staleness.j"] == [1, 2]
    assert values["domains.other_words.weight"] == [None, 2.0], "a domain's own settings stay"
    assert "run.stall_s" not in values and "domains.other_words.oubliette.tier" not in values, values


def test_page_rejects_a_directory_without_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        watched_runs([tmp_path])


async def received(lines, *names):
    """Read the event stream until every event name in `names` has occurred; return the events."""
    events, waited = [], set(names)
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append({"event": name, **json.loads(line.removeprefix("data: "))})
            waited.discard(name)
            if not waited:
                return events
    raise AssertionError(f"the stream has ended before {waited}")


async def test_event_stream_sends_new_events_and_after_a_reconnection_the_events_that_the_browser_missed(tmp_path):
    import httpx

    run_dir = written_run(tmp_path / "run", steps=5, end=False)
    more = [event for event in events(12) if event["kind"] == "step" and event["step"] > 5]
    with served_page(run_dir) as page, EventLog(run_dir / "events.jsonl") as log:
        loaded(page)
        before = page.runs[0].feed.place
        async with httpx.AsyncClient(
            base_url=page.url, cookies=page.http.cookies, trust_env=False, timeout=None
        ) as http:
            async with http.stream("GET", "/api/stream") as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                lines = stream.aiter_lines()
                assert (await received(lines, "hello"))[-1]["step"] == 5
                assert page.get("/api/now", metrics="reward", since=5)["steps"]["x"]["step"] == []
                write(log, more[0])
                log.write("alarm", alarm="stale", domain="x", step=6, what="too old")
                keep(run_dir, [sampled(6)])
                pushed = await received(lines, "step", "event", "samples")
                polled = page.get("/api/now", metrics="reward", since=5)
                assert polled["steps"]["x"]["step"] == [6] and polled["step"] == 6, "the response is not outdated"
            assert {each["step"] for each in pushed if each["event"] == "step"} == {6}
            assert all("by_domain" not in each for each in pushed)
            write(log, more[1])
            async with http.stream("GET", "/api/stream", headers={"last-event-id": before}) as stream:
                lines, steps = stream.aiter_lines(), []
                while len(steps) < 2:
                    steps += [each["step"] for each in await received(lines, "step") if each["event"] == "step"]
                assert steps == [6, 7]
                write(log, {**more[0], "reward": 0.5})
                assert (await received(lines, "rewound"))[-1]["to"] == 5
            async with http.stream("GET", "/api/stream", headers={"last-event-id": "0-0"}) as stream:
                assert (await received(stream.aiter_lines(), "behind"))[-1]["to"] == 6
        assert page.get("/api/steps")["last"] == 6


def test_page_returns_the_timeline_for_any_time_window(finished_run):
    with served_page(finished_run) as page:
        loaded(page)
        whole = page.get("/api/timeline")
        assert {"trainer", "publication"} <= {lane["lane"] for lane in whole["lanes"]}
        steps = next(lane for lane in whole["lanes"] if lane["kind"] == "trainer")["tracks"][0]
        assert steps["kind"] == "step" and steps["value"] == list(range(1, 13))
        part = page.get("/api/timeline", **{"from": 4.0, "to": 6.0, "points": 100})
        assert (part["from"], part["to"]) == (4.0, 6.0) and part["resolution"] == 0.02
        for wrong in ("from=nan", "to=-1", "points=1", "from=x"):
            assert page.http.get(f"/api/timeline?{wrong}").status_code == 422
