"""Tests of the recipe section for judging programs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipelinerl.config.oubliette import OublietteSection
from pipelinerl.verifiers.oubliette.rules import CodeRules


def test_default_section_equals_the_verifiers_default_rules() -> None:
    assert OublietteSection().rules == CodeRules()


def test_languages_must_be_known() -> None:
    assert OublietteSection(language="cpp").rules.languages == ("cpp",)
    assert OublietteSection(language="cpp", languages=("python", "cpp")).rules.languages == ("python", "cpp")
    with pytest.raises(ValidationError, match=r"language must be one of python, .* got 'cobol'"):
        OublietteSection(language="cobol")
    with pytest.raises(ValidationError, match=r"languages must hold language \(python\), got cpp"):
        OublietteSection(languages=("cpp",))
