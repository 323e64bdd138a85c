"""Without any plug-in, the core imports, checks and trains `tiny`; a recipe that names one says what is missing.

A plug-in is left out in a copy of the package, made of links, that child interpreters import instead of this one.
"""

import os
import subprocess
import sys

import pytest

from tests.architecture.tree import ROOT, project

PACKAGE = ROOT / "pipelinerl"
PLUGINS = sorted(path.name for path in (PACKAGE / "plugins").iterdir() if (path / "__init__.py").is_file())
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
#: Core modules that cannot be imported by themselves: they are programs, or need a library that is not a dependency.
ALONE = ("pipelinerl.__main__",)


def without(plugins, folder):
    """Link the package without these plug-ins into `folder`; return the environment of interpreters that use it."""
    copy = folder / "pipelinerl"
    for path in PACKAGE.iterdir():
        if path.name != "plugins" and path.name != "__pycache__":
            copy.mkdir(exist_ok=True)
            (copy / path.name).symlink_to(path)
    (copy / "plugins").mkdir()
    for path in (PACKAGE / "plugins").iterdir():
        if path.name not in plugins and path.name != "__pycache__":
            (copy / "plugins" / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "400"}


def ran(environment, *arguments):
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd="/")
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return the environment of interpreters without any plug-in that can be left out."""
    return without(PLUGINS, tmp_path_factory.mktemp("bare"))


def test_every_module_of_the_core_imports_without_plugins(bare):
    names = [
        module.name
        for module in project()
        if module.name.startswith("pipelinerl.") and not module.name.startswith(("pipelinerl.plugins.", *ALONE))
    ]
    status, text = ran(bare, "-c", IMPORT_ALL, *names)
    assert status == 0, text


def test_help_and_check_of_the_tiny_recipe_work_without_plugins(bare):
    assert (status := ran(bare, "-m", "pipelinerl", "--help"))[0] == 0, status
    assert (status := ran(bare, "-m", "pipelinerl", "check", "tiny"))[0] == 0, status


#: Changes of a recipe by the plug-in's part that they name.
NAMED = {
    ("judge", "the verifier judge"): "domains.short_words.verifier=judge",
    ("instructions", "the verifier instruction_following"): "domains.short_words.verifier=instruction_following",
    ("oubliette", "the verifier oubliette"): "domains.short_words.verifier=oubliette",
    ("oubliette", "the tool python"): "domains.short_words.episode.tools=['python']",
    ("episodes", "the kind of group episodes"): "domains.short_words.environment=openenv:http://127.0.0.1:1",
    ("trackers", "the tracker wandb"): "trackers.wandb={project='p'}",
    ("jax", "the engine jax"): "engine.type=jax",
    ("torch_mesh", "the mesh of the trainer torch"): "trainer.options.mesh={dp_shard=2}",
    ("math_answer", "the verifier math_answer"): "domains.short_words.verifier=math_answer",
    ("external_engines", "the engine vllm"): "engine.type=vllm",
    ("parameter_server", "the transport pull"): "weights.transport=pull",
    ("verifier_service", "the place of judging services"): "verification.services=1",
}
REFUSE_EACH = """
import sys
from pipelinerl.commands.check import refuse
from pipelinerl.config.recipe import load
from pipelinerl.errors import UserError
for change in sys.argv[1:]:
    try:
        refuse(load("tiny", [change]))
        print("accepted")
    except UserError as error:
        print(str(error).replace(chr(10), " "))
"""


def test_recipe_that_names_a_missing_plugin_says_which_one_and_how_to_get_it(bare):
    status, text = ran(bare, "-c", REFUSE_EACH, *NAMED.values())
    assert status == 0, text
    for (plugin, part), sentence in zip(NAMED, text.splitlines(), strict=True):
        assert sentence.endswith(
            f"{part} is in the plug-in pipelinerl.plugins.{plugin}, which this installation lacks; install pipelinerl "
            "with all its files: pip install --force-reinstall pipelinerl"
        )


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_core_works_without_this_plugin(plugin, tmp_path):
    status, text = ran(without([plugin], tmp_path), "-m", "pipelinerl", "check", "tiny")
    assert status == 0, text


@pytest.mark.slow
def test_tiny_trains_without_plugins(bare, tmp_path):
    quick = (f"run.directory={tmp_path}", "run.steps=3", "training.rollouts_per_step=32", "evaluation.problems=4")
    status, text = ran(bare, "-m", "pipelinerl", "run", "tiny", *quick)
    assert status == 0, text
    assert (tmp_path / "tiny" / "events.jsonl").read_text().count('"kind":"step"') >= 3
