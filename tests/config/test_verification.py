"""Tests of verifier settings in a recipe, and of their validation."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.judge.section import JudgeSection
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.roles.verification import open_verifier

URL = "http://127.0.0.1:9000"


def refused(**domain: Any) -> str:
    table = to_table(load("tiny"))
    with pytest.raises(RecipeError) as raised:
        config = parse(table | {"domains": [{"name": "d", "source": "addition", **domain}]})
        open_verifier(config.domains[0])
    return str(raised.value)


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        ({}, "url: must be given"),
        ({"url": "127.0.0.1:9000"}, "url: String should match pattern"),
        ({"url": "http://user:pass@host"}, "url: String should match pattern"),
        ({"url": URL, "low": 5, "high": 5}, "judge.low must be below judge.high, got 5 and 5"),
        ({"url": URL, "votes": 3}, "judge.temperature must be above 0"),
        ({"url": URL, "request_fields": {"top_p": "seed"}}, "each field a name of its own, got 'seed' twice"),
        ({"url": URL, "request_fields": {"seed": "model"}}, "each field a name of its own, got 'model' twice"),
        ({"url": URL, "request_fields": {"seed": "a b"}}, "request_fields"),
        ({"url": URL, "request_fields": {"stop": ""}}, "request_fields"),
        ({"url": URL, "pattern": "("}, "pattern: must be a regular expression"),
        ({"url": URL, "pattern": r"\d+"}, "pattern: must have one group, the score, got 0 groups"),
        (
            {"url": URL, "rubric": "Is it good?"},
            "rubric: must be quality or reference, or a template that holds {{ answer",
        ),
        ({"url": URL, "rubric": "{% if answer %}"}, "rubric is not a valid Jinja template"),
        ({"url": URL, "key_variable": "no such key"}, "key_variable: String should match pattern"),
        ({"url": URL, "key": "sk-1"}, "key: unknown key"),
        (
            {"url": URL, "key_variable": "NO_SUCH_KEY"},
            "domains.d.judge.key_variable names $NO_SUCH_KEY, which is not set",
        ),
    ],
)
def test_error_names_the_invalid_judge_setting(judge: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(verifier="judge", judge=judge)


def test_judge_verifier_needs_a_judge_section_and_a_judge_section_needs_the_judge_verifier() -> None:
    assert "domains.d.judge must be given for judge: judge = { url = … }" in refused(verifier="judge")
    assert "judge configures the verifier judge, which this domain does not use" in refused(judge={"url": URL})
    assert "domains.d.judge must be given for judge" in refused(rewards=[{"function": "judge"}])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"instructions": {"score": "all"}}, "instructions configures the verifier instruction_following, which"),
        ({"oubliette": {"language": "cpp"}}, "oubliette configures the verifier oubliette or the tool python, which"),
    ],
)
def test_options_of_a_verifier_that_the_domain_does_not_use_are_rejected(
    options: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(verifier="math_answer", **options)


@pytest.mark.parametrize("url", [f"{URL}", f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_judge_url_may_end_with_v1_or_a_slash(url: str) -> None:
    assert JudgeSection(url=url).url == URL


def test_judge_key_is_absent_from_repr_and_saved_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret-7")
    section = JudgeSection(url=URL, key_variable="A_KEY")
    domain = DomainSection(name="d", source="addition", verifier="judge", judge=section)
    config = load("tiny").model_copy(update={"domains": (domain,)})
    assert section.token == "secret-7"
    assert "secret-7" not in repr((section, to_table(config)))
    assert to_table(config)["domains"][0]["judge"]["key_variable"] == "A_KEY"


def test_programming_languages_in_the_oubliette_section_must_be_known() -> None:
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
def test_answers_are_judged_by_verifier_services_if_the_recipe_starts_or_chooses_such_services(
    changes: list[str], uses_services: bool
) -> None:
    assert load("tiny", changes).verification.uses_services is uses_services


def test_recipe_that_starts_verifier_services_but_judges_in_actors_is_rejected() -> None:
    with pytest.raises(RecipeError, match="they would be unused"):
        load("tiny", ["verification.services=1", "verification.judged_in=actors"])
