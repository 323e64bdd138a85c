"""The controller's process: new and resumed runs, and the files that it writes for resuming and for local commands."""

import asyncio
import json
import logging
import shutil
import stat
from contextlib import asynccontextmanager

import httpx
import pytest

from launch.run_directory import create, open_run
from pipelinerl.commands.remote import address_of, controller_of
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.config.sections import StreamsSection
from pipelinerl.errors import UserError
from pipelinerl.messages import REPORTS, ROLLOUTS, encode
from pipelinerl.observability.events import read_events
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.roles import controller_role, new_controller, resumed_run
from pipelinerl.roles.new_controller import build_controller, overruled
from pipelinerl.roles.process import Identity
from pipelinerl.roles.wiring import checkpoints_of, knobs_of
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.system.storage import Storage
from tests.controller.world import alive
from tests.fakes.checkpoints import model_directory, save, state_of
from tests.patience import PATIENCE_S

DEADLINE_S = PATIENCE_S


def test_resumed_run_warns_if_a_knob_that_was_changed_live_differs_from_the_recipe():
    config = load("tiny", ["optimizer.learning_rate=1e-5"])
    knobs = knobs_of(config)
    assert overruled(config, knobs) == []
    (sentence,) = overruled(config, knobs.patched({"learning_rate": 0.5}))
    assert sentence == (
        "learning_rate is 0.5, set while the run was live; the recipe has 1e-05; change it with `pipelinerl knobs set`"
    )


@pytest.mark.parametrize(
    ("changes", "host", "shares"),
    [
        ([], "127.0.0.1", True),
        (["staleness.mode=on_policy"], "127.0.0.1", False),
        (["engine.device=cuda"], "127.0.0.1", False),
        (["trainer.type=jax"], "127.0.0.1", False),
        ([], "0.0.0.0", False),
    ],
)
def test_engines_and_trainer_may_take_turns_only_if_they_share_this_machines_cores(changes, host, shares, monkeypatch):
    monkeypatch.setattr(new_controller, "usable_cores", lambda: (0, 1))
    base = ["staleness.mode=auto", "engine.device=cpu", "trainer.device=cpu"]
    assert new_controller.shared_cores(load("tiny", [*base, *changes]), host) == ((0, 1) if shares else ())


@pytest.fixture
def redis_url(tmp_path):
    with EmbeddedRedis(tmp_path / "server") as server:
        yield server.url


def config_in(directory, *changes):
    return load("tiny", [f"run.directory={directory}", *changes])


def identity(config, redis_url, *, host="127.0.0.1"):
    about = {"redis_url": redis_url, "token": "run-token", "host": host}
    return Identity(run_dir=config.run_directory, config=config, name="controller", **about)


@asynccontextmanager
async def serving(who, *, from_journal=False):
    """Run a controller; yield the path of the file to which it writes its address."""
    endpoint = who.run_dir / "controller.json"
    role = asyncio.create_task(controller_role.run(who, from_journal=from_journal))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not endpoint.exists() and not role.done():
                await asyncio.sleep(0.01)
        if role.done():
            await role
        yield endpoint
    finally:
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)


async def status_of(run_dir):
    """Return the status of a run; an answer implies that its controller's journal exists."""
    with controller_of(run_dir) as remote:
        return await asyncio.to_thread(remote.status)


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "[::1]"),
        ("::", "[::1]"),
    ],
)
async def test_local_commands_find_and_reach_a_controller_whichever_interface_it_listens_on(
    tmp_path, redis_url, host, reached_at
):
    async with serving(identity(config_in(tmp_path), redis_url, host=host)) as endpoint:
        assert stat.S_IMODE(endpoint.stat().st_mode) == 0o600
        with controller_of(endpoint.parent) as remote:
            assert remote.url.rpartition(":")[0] == f"http://{reached_at}"
            assert (await asyncio.to_thread(remote.status)).run == "tiny"
    assert not endpoint.exists()


async def test_run_whose_processes_were_started_one_by_one_can_be_resumed(tmp_path, redis_url):
    config = config_in(tmp_path / "runs", f"checkpoint.location=memory://{tmp_path.name}")
    async with serving(identity(config, redis_url)) as endpoint:
        directory = open_run(endpoint.parent)
    assert to_table(directory.config) == to_table(config), (
        "the address of this machine's server is not stored in the recipe of the run"
    )
    assert stat.S_IMODE(directory.recipe.stat().st_mode) == 0o600
    directory.path.rename(tmp_path / "lost")
    assert resumed_run.directory_of(f"memory://{tmp_path.name}/tiny") == directory.path
    assert to_table(open_run(directory.path).config) == to_table(config)


def test_recipe_is_saved_once_with_the_address_of_a_remote_stream_server(tmp_path):
    config = config_in(tmp_path)
    config.run_directory.mkdir()
    resumed_run.write_recipe(config, config.run_directory, "redis://:secret@db.lab:6379/0", begins=True)
    address = open_run(config.run_directory).config.streams.redis_url
    assert address.get_secret_value() == "redis://:secret@db.lab:6379/0"
    (config.run_directory / "recipe.toml").write_text("# edited since\n")
    resumed_run.write_recipe(config, config.run_directory, "redis://:secret@db.lab:6379/0", begins=False)
    assert (config.run_directory / "recipe.toml").read_text() == "# edited since\n"


def test_new_run_starts_even_if_its_checkpoint_location_is_unwritable(tmp_path, caplog):
    config = config_in(tmp_path, "checkpoint.location=nosuchscheme://bucket")
    config.run_directory.mkdir()
    resumed_run.write_recipe(config, config.run_directory, "redis://127.0.0.1:6379/0", begins=True)
    assert "nosuchscheme://bucket/tiny cannot be resumed from yet" in caplog.text


def test_new_run_does_not_replace_checkpoint_copies_of_another_run_with_the_same_name(tmp_path):
    """Otherwise the new run's first checkpoint would delete the other run's copies of all later steps."""
    location = f"checkpoint.location=memory://{tmp_path.name}"
    first, second = (identity(config_in(tmp_path / place, location), "redis://") for place in ("here", "there"))
    for each in (first, second):
        each.run_dir.mkdir(parents=True)
    resumed_run.write_recipe(first.config, first.run_dir, first.redis_url, begins=True)
    with pytest.raises(UserError, match=r"holds the copies of a run, .* is not its directory; choose another"):
        resumed_run.write_recipe(second.config, second.run_dir, second.redis_url, begins=True)
    assert not (second.run_dir / "recipe.toml").exists(), "it is asked again when it is started again"
    resumed_run.write_recipe(
        second.config, second.run_dir, second.redis_url, begins=False
    )  # accepted: it continues the same run on another machine
    assert (second.run_dir / "recipe.toml").exists()


async def test_new_run_is_rejected_while_a_run_with_the_same_name_is_live_at_the_stream_server(
    tmp_path, redis_url, monkeypatch
):
    monkeypatch.setattr(controller_role, "_LOOK_S", DEADLINE_S)  # how long to look for a live run of the same name
    first, second = (identity(config_in(tmp_path / place), redis_url) for place in ("here", "there"))
    async with serving(first) as endpoint:
        address = json.loads(endpoint.read_text())
        headers = {"authorization": f"Bearer {address['token']}"}
        async with httpx.AsyncClient(base_url=address["url"], headers=headers, trust_env=False) as http:

            async def say():  # makes the first controller write to its journal, as a live controller does
                (await http.patch("/knobs", json={"temperature": 0.9})).raise_for_status()

            async def keep_writing():
                while True:
                    await asyncio.sleep(0.1)
                    await say()

            await say()
            writing = asyncio.create_task(keep_writing())
            with pytest.raises(UserError, match="a run named 'tiny' is live at this stream server"):
                async with serving(second):
                    pass
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            assert (await http.get("/status")).status_code == 200, "the first goes on"
    monkeypatch.setattr(controller_role, "_LOOK_S", 0.5)
    async with serving(second):
        assert (second.run_dir / "events.jsonl").exists(), "a name is free once its run has ended"


async def test_new_run_deletes_rollouts_left_by_a_dead_run_with_the_same_name(tmp_path, redis_url, monkeypatch):
    stream = await open_stream(redis_url, namespace="tiny")
    await stream.append(ROLLOUTS + "actor-0", [b"of another model", b"of another model"])
    async with serving(identity(config_in(tmp_path), redis_url)), asyncio.timeout(DEADLINE_S):
        while await stream.length(ROLLOUTS + "actor-0"):
            await asyncio.sleep(0.01)
    await stream.append(ROLLOUTS + "actor-0", [b"its own"])
    (config_in(tmp_path).run_directory / "events.jsonl").write_text('{"kind": "step", "elapsed_s": 3.0}\n')
    monkeypatch.setattr(controller_role, "_LOOK_S", 10 * DEADLINE_S)  # it does not look for a live run of its name
    async with serving(identity(config_in(tmp_path), redis_url)) as endpoint:
        await status_of(endpoint.parent)
        assert await stream.length(ROLLOUTS + "actor-0") == 1, "a run that goes on keeps what it has"
    await stream.close()


async def test_replaced_controller_ends_before_its_successor_writes(tmp_path, redis_url):
    """The successor stops it through the journal, and waits for it to close the event log."""
    who = identity(config_in(tmp_path), redis_url)
    async with serving(who) as endpoint, asyncio.timeout(DEADLINE_S):
        await status_of(who.run_dir)
        first = address_of(who.run_dir).url
        async with serving(who, from_journal=True), httpx.AsyncClient(trust_env=False) as http:
            while not endpoint.exists() or address_of(who.run_dir).url == first:
                await asyncio.sleep(0.01)
            with pytest.raises(httpx.TransportError):
                await http.get(f"{first}/health")
            assert (await status_of(who.run_dir)).run == "tiny"
    assert not endpoint.exists()
    kinds = [event["kind"] for event in read_events(who.run_dir / "events.jsonl")]
    assert [kind for kind in kinds if kind != "engines"] == ["run_started", "controller_returned"]


async def test_second_controller_of_a_live_run_is_rejected_and_damages_nothing(tmp_path, redis_url):
    who = identity(config_in(tmp_path), redis_url)
    async with serving(who) as endpoint:
        await status_of(who.run_dir)
        history, address = (who.run_dir / "events.jsonl").read_bytes(), endpoint.read_text()
        with pytest.raises(UserError, match=r"events.jsonl is being written by .* take over with .*--continue"):
            await controller_role.run(who)
        assert (who.run_dir / "events.jsonl").read_bytes().startswith(history)
        assert endpoint.read_text() == address, "local commands still reach the first controller"
        assert (await status_of(who.run_dir)).run == "tiny"


async def test_controller_that_would_forget_a_live_trainer_is_rejected(tmp_path, redis_url, monkeypatch):
    """The controller died, its trainer and actors live; without the journal, they would never get a directive again."""
    who = identity(config_in(tmp_path), redis_url)
    async with serving(who):
        await status_of(who.run_dir)
    stream = await open_stream(redis_url, namespace="tiny")

    async def report():
        while True:
            await stream.append(REPORTS, [encode(alive())])
            await asyncio.sleep(0.05)

    reporting = asyncio.create_task(report())
    try:
        with pytest.raises(UserError, match=r"trainer and actors of .* are live; take over with .*--continue"):
            while True:  # the first report may be on its way
                async with serving(who):
                    pass
        async with serving(who, from_journal=True):
            await status_of(who.run_dir)
            assert read_events(who.run_dir / "events.jsonl")[-1]["kind"] in ("controller_returned", "engines")
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
    monkeypatch.setattr(controller_role, "_LOOK_S", 0.3)
    async with serving(who) as endpoint:
        assert endpoint.exists(), "once they have ended, the run begins from its checkpoint"
    await stream.close()


@pytest.fixture
def config(tmp_path):
    return parse(
        {
            "model": {"path": str(model_directory(tmp_path / "model"))},
            "domains": [{"name": "d", "source": "s"}],
            "run": {"name": "tiny", "directory": str(tmp_path / "runs")},
            "checkpoint": {"location": f"memory://{tmp_path.name}"},
        }
    )


def url_of(config):
    return config.checkpoint.url_of(config.run.name)


def begun(config, *versions):
    directory = create(config, claim=resumed_run.claim)
    store = checkpoints_of(directory.config, directory.path)
    for version in versions:
        store.copy(save(store, version))
    return directory.path, store


def lost(config, *versions):
    path, _ = begun(config, *versions)
    shutil.rmtree(path)
    return path


def test_new_run_gets_a_number_if_its_name_is_taken_at_the_checkpoint_location(config):
    lost(config)  # as on another machine, which lacks the directory
    path, _ = begun(config)
    assert path.name == "tiny-2"
    assert resumed_run.claim(load(path / "recipe.toml")) is False
    elsewhere = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"location": None})})
    assert resumed_run.claim(elsewhere) is True


def test_run_is_restored_from_a_url_with_checkpoint_recipe_and_events(config):
    path, store = begun(config)
    (path / "events.jsonl").write_text('{"kind": "run_started"}\n')
    for version in (3, 6):
        store.copy(save(store, version))
    (path / "events.jsonl").unlink()
    shutil.rmtree(path)
    assert resumed_run.directory_of(url_of(config) + "/") == path
    assert to_table(load(path / "recipe.toml")) == to_table(config)
    assert (path / "events.jsonl").read_text() == '{"kind": "run_started"}\n'
    newest = checkpoints_of(config, path).latest()
    assert newest is not None and newest[1] == state_of(6)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "no draft is left"


def test_run_without_a_complete_checkpoint_at_its_url_is_restored_to_begin_again(config):
    path = lost(config)
    assert resumed_run.directory_of(url_of(config)) == path
    assert sorted(entry.name for entry in path.iterdir()) == ["layout", "recipe.toml"]


def test_run_secrets_are_neither_copied_nor_readable_by_others(config):
    url = "redis://ada:s3cret@db:6379/3?db=1&password=s3cret&timeout=9"
    path, _ = begun(config.model_copy(update={"streams": StreamsSection(redis_url=url)}), 3)
    address = load(path / "recipe.toml").streams.redis_url
    assert address.get_secret_value() == url
    place = Storage(url_of(config))
    (copy,) = [name for name in place.names() if name.startswith("step-")]
    for name in ("recipe.toml", f"{copy}/run/recipe.toml"):
        assert b"s3cret" not in place.read(name) and b"ada" not in place.read(name)
    shutil.rmtree(path)
    resumed_run.directory_of(url_of(config))
    address = load(path / "recipe.toml").streams.redis_url
    assert address.get_secret_value() == "redis://db:6379/3?db=1&timeout=9"
    assert stat.S_IMODE((path / "recipe.toml").stat().st_mode) == 0o600


def test_restoring_a_checkpoint_that_contains_no_recipe_uses_the_recipe_next_to_the_checkpoints(config):
    """A checkpoint has no recipe if the trainer runs on another machine than the controller, in its own directory."""
    path, store = begun(config)
    (path / "recipe.toml").unlink()
    store.copy(save(store, 3))
    shutil.rmtree(path)
    assert resumed_run.directory_of(url_of(config)) == path
    assert to_table(load(path / "recipe.toml")) == to_table(config)


def test_damaged_checkpoint_copy_is_skipped_with_a_log_entry(config, caplog):
    path = lost(config, 3, 6)
    place = Storage(url_of(config))
    (newest,) = [name for name in place.names() if name.startswith("step-000006")]
    place.write(f"{newest}/model.safetensors", b"other weights")
    with caplog.at_level(logging.ERROR):
        resumed_run.directory_of(url_of(config))
    assert "skipping a damaged checkpoint" in caplog.text
    assert [copy.name for copy in checkpoints_of(config, path).all()] == ["step-000003"]


def test_missing_model_directory_is_restored_from_the_checkpoint(config):
    path = lost(config, 3)
    shutil.rmtree(config.model.resolved)
    resumed_run.directory_of(url_of(config))
    moved = load(path / "recipe.toml")
    assert moved.model.resolved == path / "model"
    assert BigramModel.load(path / "model").logits[0, 0] == 3.0
    assert sorted(file.name for file in (path / "model").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert to_table(moved.model_copy(update={"model": config.model})) == to_table(config), "nothing else has changed"


def test_resume_is_rejected_if_the_reference_model_is_missing(config):
    path = lost(config.model_copy(update={"objective": {"preset": "grpo", "grad2": "kl"}}), 3)
    shutil.rmtree(config.model.resolved)
    with pytest.raises(UserError, match="is the reference of this run; copy it here"):
        resumed_run.directory_of(url_of(config))
    assert not path.exists()


def test_resume_is_rejected_if_run_directory_and_checkpoint_location_both_hold_checkpoints(config):
    path, store = begun(config, 3)
    assert resumed_run.directory_of(str(path)) == path
    with pytest.raises(UserError, match=f"resume what is there with --resume {path}"):
        resumed_run.directory_of(url_of(config))
    store.copy(save(store, 6))  # another machine copies a newer checkpoint than this one has
    shutil.rmtree(path / "checkpoints" / "step-000006")
    with pytest.raises(UserError, match=r"continued elsewhere: .* of step 3, .* of step 6"):
        resumed_run.directory_of(str(path))


def test_resume_from_a_url_that_holds_no_run_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"holds no run; expected <checkpoint\.location>/<run\.name>"):
        resumed_run.directory_of(f"file://{tmp_path}/nothing")


def test_log_of_a_run_says_how_many_rows_of_its_data_were_dropped(tmp_path, caplog):
    rows = [json.dumps({"prompt": f"say {n % 50}", "answer": "x"}) + "\n" for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    config = config_in(tmp_path)
    domain = {"name": "d", "source": "files", "parameters": {"path": str(tmp_path / "a.jsonl")}}
    with caplog.at_level(logging.INFO, logger="pipelinerl"):
        build_controller(parse(to_table(config) | {"domains": [domain]}), None)
    (record,) = (record for record in caplog.records if "rows read" in record.message)
    assert record.message.startswith("domains.d: 60 rows read: ") and "10 dropped as duplicates" in record.message
