"""The section of a domain that says how programs are judged."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipelinerl.config.oubliette import OublietteSection
from pipelinerl.verifiers.oubliette.rules import CodeRules


def test_left_out_it_is_the_verifiers_own_rules() -> None:
    assert OublietteSection().rules == CodeRules()


def test_languages_are_those_that_are_known() -> None:
    assert OublietteSection(language="cpp").rules.languages == ("cpp",)
    assert OublietteSection(language="cpp", languages=("python", "cpp")).rules.languages == ("python", "cpp")
    with pytest.raises(ValidationError, match=r"language must be one of python, .* got 'cobol'"):
        OublietteSection(language="cobol")
    with pytest.raises(ValidationError, match=r"languages must hold language \(python\), got cpp"):
        OublietteSection(languages=("cpp",))
