"""The documentation: every link resolves, every page is in the site's navigation, every recipe key is described."""

import re
import sys
from pathlib import Path

import pytest

from pipelinerl.config.recipe import RunConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from reference_pages import pages  # noqa: E402  the hook of mkdocs.yml is in docs/

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
GENERATED = pages()


def _anchors(text):
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_documentation_resolve(page):
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        path = (page.parent / name).resolve() if name else page
        if path.is_relative_to(ROOT / "docs") and str(path.relative_to(ROOT / "docs")) in GENERATED:
            continue
        assert path.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in _anchors(path.read_text()), f"{target}: no such heading"


def test_navigation_of_the_documentation_site_lists_every_page():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES if "docs" in page.parts} | GENERATED.keys()


def test_recipe_reference_page_has_every_section_of_a_recipe():
    sections = {name for name in RunConfig.model_fields if name not in ("base", "objective")}
    documented = set(re.findall(r"^## `\[+(\w+)", GENERATED["reference/recipe.md"], re.MULTILINE))
    assert documented == sections, "a section of the recipe is missing from docs/reference_pages.py's output"


def test_command_reference_page_describes_the_run_command_and_its_resume_option():
    assert "## `pipelinerl run`" in GENERATED["reference/cli.md"] and "--resume" in GENERATED["reference/cli.md"]
