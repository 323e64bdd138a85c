"""A verifier in a package of its own works like one of ours once that package is installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "verifier_package"
RECIPE = PACKAGE / "short_answers.toml"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the package as pip installs it: its module, and its metadata with the entry point."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copy(PACKAGE / "length_verifier.py", folder)
    info = folder / f"length_verifier-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def checked(site, *changes):
    path = {} if site is None else {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pipelinerl", "check", str(RECIPE), "evaluation.problems=4", *changes]
    done = subprocess.run(command, env={**os.environ, **path, "COLUMNS": "400"}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_check_shows_the_findings_and_the_verdicts_of_a_verifier_from_another_package(installed):
    status, text = checked(installed)
    assert status == 0, text
    assert "domains.words: reference answers have up to 1 words, and most_words is 2" in text
    assert re.search(r"of the reference answer correct, reward 1 in .* s: 1 words; of an empty answer correct", text)


def test_unknown_option_of_a_verifier_from_another_package_is_rejected(installed):
    status, text = checked(installed, "domains.words.length.most_word=3")
    assert status == 2 and "domains.words.length.most_word: unknown key; did you mean most_words?" in text, text
    assert "Traceback" not in text


def test_recipe_that_names_a_verifier_of_a_missing_package_is_rejected_in_one_sentence():
    status, text = checked(None)
    assert status == 2 and "Traceback" not in text
    assert "domains.words.verifier must be one of math_answer, " in text and "got 'length'" in text, text


def test_verifier_on_the_plugin_page_equals_the_example():
    page = (ROOT / "docs" / "use" / "plugins.md").read_text()
    blocks = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    files = ("length_verifier.py", "pyproject.toml", RECIPE.name)
    assert blocks[:3] == [(PACKAGE / name).read_text() for name in files]
