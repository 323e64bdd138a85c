"""Tests of verifier settings in a recipe, and of their validation."""

import pytest
from pydantic import ValidationError

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.judge import JudgeSection
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.roles.verification import open_verifier

URL = "http://127.0.0.1:9000"


def refused(**domain):
    table = to_table(load("tiny"))
    with pytest.raises(RecipeError) as raised:
        config = parse(table | {"domains": [{"name": "d", "source": "addition", **domain}]})
        open_verifier(config.domains[0])
    return str(raised.value)


def test_judge_among_rewards_needs_a_judge_section():
    assert "domains.d.judge must be given for judge" in refused(rewards=[{"function": "judge"}])


@pytest.mark.parametrize("url", [f"{URL}", f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_judge_url_may_end_with_v1_or_a_slash(url):
    assert JudgeSection(url=url).url == URL


def test_judge_key_is_absent_from_repr_and_saved_recipe(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret-7")
    section = JudgeSection(url=URL, key_variable="A_KEY")
    domain = DomainSection(name="d", source="addition", verifier="judge", judge=section)
    config = load("tiny").model_copy(update={"domains": (domain,)})
    assert section.token == "secret-7"
    assert "secret-7" not in repr((section, to_table(config)))
    assert to_table(config)["domains"][0]["judge"]["key_variable"] == "A_KEY"


def test_programming_languages_in_the_oubliette_section_must_be_known():
    assert OublietteSection(language="cpp").accepted_languages == ("cpp",)
    assert OublietteSection(language="cpp", languages=("python", "cpp")).accepted_languages == ("python", "cpp")
    with pytest.raises(ValidationError, match=r"language must be one of python, .* got 'cobol'"):
        OublietteSection(language="cobol")
    with pytest.raises(ValidationError, match=r"languages must hold language \(python\), got cpp"):
        OublietteSection(languages=("cpp",))


@pytest.mark.parametrize(
    ("changes", "uses_services"),
    [
        ([], False),
        (["verification.services=2"], True),
        (["verification.judged_in=services"], True),
        (["verification.judged_in=actors"], False),
    ],
)
def test_answers_are_judged_by_verifier_services_if_the_recipe_starts_or_chooses_such_services(changes, uses_services):
    assert load("tiny", changes).verification.uses_services is uses_services
