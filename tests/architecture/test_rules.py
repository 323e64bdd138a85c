"""The house rules hold in every module, and each rule can fail."""

import pytest

from tests.architecture.rule_table import RULES, TEST_RULES
from tests.architecture.rules import (
    BASES_ALLOWED,
    HEAVY_ALLOWED,
    HTTP_OPENERS,
    OPENS_HTTP,
    PICKLE_ALLOWED,
    RANDOMNESS_ALLOWED,
    cycles,
)
from tests.architecture.tree import ROOT, Module, project, suite

ALL = (*RULES, *TEST_RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_product_module_follows_each_house_rule(rule):
    broken = [f"{module.path}: {problem}" for module in project() for problem in rule.check(module)]
    assert not broken, "\n".join([rule.check.__doc__ or "", *broken])


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.name)
def test_every_test_module_follows_each_house_rule_for_tests(rule):
    broken = [f"{module.path}: {problem}" for module in suite() for problem in rule.check(module)]
    assert not broken, "\n".join([rule.check.__doc__ or "", *broken])


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_each_house_rule_rejects_its_examples_of_bad_code(rule):
    assert rule.breaks
    for path, source in rule.breaks:
        assert list(rule.check(Module(path, source))), f"{rule.name} misses, in {path}:\n{source}"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_each_house_rule_accepts_its_examples_of_good_code(rule):
    for path, source in rule.keeps:
        assert not list(rule.check(Module(path, source))), f"{rule.name} refuses, in {path}:\n{source}"


def test_product_modules_have_no_import_cycles():
    assert cycles(project()) == []


def test_import_cycle_is_detected():
    a = Module("launch/a.py", "def f():\n    from launch.b import x")
    b = Module("launch/b.py", "import launch.c")
    c = Module("launch/c.py", "from launch import a")
    assert cycles((a, b, c)) == [("launch.a", "launch.b", "launch.c")]
    assert cycles((a, b)) == []


def test_relative_imports_are_rejected():
    with pytest.raises(AssertionError, match="absolute name"):
        _ = Module("launch/a.py", "from . import b").imports


def test_house_rules_check_modules_of_every_package():
    names = {module.name for module in project()}
    assert {"inference_contract.schemas", "trainer_contract.types", "pipelinerl.rng", "launch.supervisor"} <= names


def test_files_in_the_exception_lists_of_the_house_rules_exist():
    excepted = {*HEAVY_ALLOWED, *RANDOMNESS_ALLOWED, *PICKLE_ALLOWED, *BASES_ALLOWED, *OPENS_HTTP}
    assert excepted <= {module.path for module in project()}


def test_files_that_are_allowed_to_open_http_connections_do_open_them():
    for path in OPENS_HTTP:
        assert any(opener in (ROOT / path).read_text() for opener in HTTP_OPENERS), f"{path} opens none: off the list"
