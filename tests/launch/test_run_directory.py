"""The directory of a run: numbered if its name is taken, with private files, resumable, for one launcher at a time."""

import json
import math
import os
import resource
import stat
from itertools import takewhile
from pathlib import Path

import pytest

from launch.run_directory import BOUND, change_recipe, create, open_run, record_change
from pipelinerl.config.recipe import RunConfig, parse, to_table, write_layout
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.watch.report import write_report
from tests.fakes.checkpoints import model_directory


def _config(directory, **sections):
    return parse(
        {
            "model": {"path": "m"},
            "domains": [{"name": "d", "source": "s", "parameters": {"digits": [1, 2], "ops": "+-"}}],
            "run": {"name": "tiny", "directory": str(directory)},
            **sections,
        }
    )


def test_recipe_file_in_the_run_directory_contains_every_key(tmp_path):
    config = _config(tmp_path, optimizer={"learning_rate": 1e-6}, staleness={"j": 1, "k": math.inf})
    made = create(config)
    assert made.path == tmp_path / "tiny"
    assert to_table(open_run(made.path).config) == to_table(config)
    assert "learning_rate = 1e-06" in made.recipe.read_text()
    assert stat.S_IMODE(made.recipe.stat().st_mode) == 0o600, "the recipe may hold the password of a stream server"


def test_directory_of_a_run_whose_name_is_taken_gets_a_number(tmp_path):
    previous = os.umask(0)
    try:
        made = [create(_config(tmp_path)).path for _ in range(3)]
    finally:
        os.umask(previous)
    assert [path.name for path in made] == ["tiny", "tiny-2", "tiny-3"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o755}, "not writable by others"
    assert open_run(tmp_path / "tiny-3").config.run.name == "tiny-3"


def test_run_whose_checkpoint_location_is_rejected_leaves_no_run_directory(tmp_path):
    def refuses(config):
        raise UserError("nobody answers there")

    with pytest.raises(UserError, match="nobody answers"):
        create(_config(tmp_path), claim=refuses)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_no_partial_run_directory(tmp_path):
    """If a partial directory were left, the next run would take it for an existing run, and would be named tiny-2."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, allowed[1]))
    try:
        with pytest.raises(UserError, match=r"run.directory: .*tiny cannot be written: File too large"):
            create(_config(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert list(tmp_path.iterdir()) == []


def test_tilde_in_the_path_of_the_run_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _config(Path("~/runs")).run_directory == tmp_path / "runs" / "tiny"


def test_auth_token_of_a_run_is_private_and_new_at_each_launch(tmp_path):
    made = create(_config(tmp_path))
    seen = []
    for _ in range(2):
        with made.locked():
            seen.append(json.loads(made.tokens.read_text()))
            assert stat.S_IMODE(made.tokens.stat().st_mode) == 0o600
    assert set(seen[0]) == {"token"}
    assert len(seen[0]["token"]) >= 32
    assert seen[0] != seen[1]


def test_second_launcher_in_the_same_run_directory_is_rejected(tmp_path):
    made = create(_config(tmp_path))
    with made.locked():
        before = made.tokens.read_text()
        with pytest.raises(UserError, match="is being run by process"), open_run(made.path).locked():
            pass
        assert made.tokens.read_text() == before
    with made.locked():
        pass


def test_directory_without_a_run_is_rejected(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        open_run(tmp_path)
    (tmp_path / "recipe.toml").write_text("run = 3")
    write_layout(tmp_path)
    with pytest.raises(RecipeError):
        open_run(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "away").symlink_to(tmp_path / "nowhere")
    # The error names `tiny`, which shows that no further name such as tiny-2 was tried.
    with pytest.raises(UserError, match="away/tiny cannot be made"):
        create(_config(tmp_path / "away"))
    with pytest.raises(UserError, match="cannot be made"):
        create(_config(tmp_path / "file"))


@pytest.fixture
def run_dir(tmp_path):
    table = {
        "model": {"path": str(model_directory(tmp_path / "model"))},
        "domains": [{"name": "d", "source": "s"}, {"name": "e", "source": "s"}],
        "run": {"name": "tiny", "directory": str(tmp_path / "runs"), "steps": 30},
    }
    return create(parse(table)).path


def changed(run_dir, *overrides):
    return record_change(run_dir, change_recipe(run_dir, overrides), step=3)


def test_recipe_change_on_resume_is_recorded_with_its_step(run_dir):
    output = changed(run_dir, "run.steps=45", "optimizer.learning_rate=1e-5", "staleness.k=4", "domains.e.weight=0.5")
    assert [line.partition(" (was")[0] for line in output] == [
        "resumed at step 3: domains.e.weight = 0.5",
        "resumed at step 3: optimizer.learning_rate = 1e-05",
        "resumed at step 3: run.steps = 45",
        "resumed at step 3: staleness.k = 4",
    ]
    assert changed(run_dir, "run.steps=45", "run.seed=0") == [], "these are the present values"
    config = open_run(run_dir).config
    assert (config.run.steps, config.optimizer.learning_rate, config.staleness.bounds.k) == (45, 1e-5, 4)
    changed(run_dir, "checkpoint.keep=5")
    lines = (run_dir / "recipe.toml").read_text().splitlines()
    assert "# resumed at step 3: run.steps = 45 (was 30)" in lines
    assert "# resumed at step 3: checkpoint.keep = 5 (was 2)" in lines, "earlier changes stay in the file"


def test_report_shows_recipe_changes_made_on_resume(run_dir):
    changed(run_dir, "run.steps=45")
    (run_dir / "events.jsonl").write_text(json.dumps({"time": 1.0, "kind": "run_started", "elapsed_s": 0.0}) + "\n")
    assert "resumed at step 3: run.steps = 45 (was 30)" in write_report(run_dir).html.read_text()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.seed=7", "run.seed cannot change on a resumed run: the problems and answers drawn so far"),
        ("run.name=other", "run.name cannot change on a resumed run: it names the run's directory"),
        ("model.path=elsewhere", "model.path cannot change .* the trainer's state in the checkpoint"),
        ("domains.d.source=other", "domains.d.source cannot change .* drawn so far"),
        ("sampling.group_size=8", "sampling.group_size cannot change .* keep their size"),
        ("objective=grpo", "objective cannot change .* steps taken so far"),
        ("trainer.precision=bf16", "trainer.precision cannot change .* trainer's state"),
        ("training.epochs=2", "training.epochs cannot change .* steps taken so far"),
        ("evaluation.problems=3", "evaluation.problems cannot change .* could not be compared"),
    ],
)
def test_recipe_change_that_contradicts_the_checkpoint_is_rejected_with_the_name_of_the_key(run_dir, override, reason):
    before = (run_dir / "recipe.toml").read_text()
    with pytest.raises(RecipeError, match=reason):
        changed(run_dir, "run.steps=45", override)
    assert (run_dir / "recipe.toml").read_text() == before, "the recipe file is unchanged"


def test_recipe_key_whose_knob_was_changed_in_the_live_run_cannot_be_changed_on_resume(run_dir):
    knobs = {"time": 1.0, "kind": "knobs", "changes": {"k": 9}, "who": "ada", "step": 2}
    (run_dir / "events.jsonl").write_text(json.dumps(knobs) + "\n")
    with pytest.raises(RecipeError, match=r"staleness.k was changed while the run was live.* knobs set .* k=…"):
        changed(run_dir, "staleness.k=4")
    assert changed(run_dir, "optimizer.learning_rate=1e-5")


def test_recipe_of_a_live_run_cannot_be_changed(run_dir):
    with open_run(run_dir).locked(), pytest.raises(UserError, match="is being run by process"):
        changed(run_dir, "run.steps=45")
    assert open_run(run_dir).config.run.steps == 30


FOUR = 'trainer.options={mesh={dp_shard=2},experts="parallel",attention="buckets",optimizer={moments="bf16"}}'


def test_trainer_options_may_be_set_and_removed_on_resume(run_dir):
    assert changed(run_dir, "trainer.options.compile=false") != []
    assert len(changed(run_dir, FOUR)) == 5
    assert len(changed(run_dir, "trainer.options={}")) == 4
    for bound in ("lora={}", "lora.rank=8", "mine=3"):
        with pytest.raises(RecipeError, match=r"trainer.options.\w.* cannot change .* trainer's state"):
            changed(run_dir, f"trainer.options.{bound}")


@pytest.mark.parametrize(("key", "old", "new"), [("steps", "30", "45"), ("seed", "0", "7")])
def test_edited_recipe_obeys_the_same_table_as_overrides(run_dir, key, old, new):
    recipe = run_dir / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(f"\n{key} = {old}\n", f"\n{key} = {new}\n", 1))
    if BOUND.get(f"run.{key}"):
        with pytest.raises(RecipeError, match=f"run.{key} cannot change on a resumed run"):
            changed(run_dir)
        return
    assert changed(run_dir) == [f"resumed at step 3: run.{key} = {new} (was {old})"]
    assert changed(run_dir) == [], "an edit is recorded once"


def test_docs_name_every_key_that_a_checkpoint_binds_with_its_reason_and_exceptions():
    lines = (Path(__file__).parents[2] / "docs/use/checkpoints.md").read_text().splitlines()
    first = lines.index("| key | may not change on a resumed run, because | except |") + 2
    rows = list(takewhile(lambda line: line.startswith("|"), lines[first:]))
    expected = []
    for key, reason in BOUND.items():
        inner = [each for each, its in BOUND.items() if each.startswith(f"{key}.") and not its]
        if reason:
            exceptions = ", ".join(f"`{each.removeprefix(f'{key}.')}`" for each in inner)
            expected.append(f"| `{key}` | {reason} | {exceptions} |")
    assert rows == expected
    assert RunConfig.model_fields.keys() - BOUND.keys() == set(), "a section states which of its keys may change"
