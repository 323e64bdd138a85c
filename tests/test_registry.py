"""The registry maps names in recipes to implementations, imported only when chosen; errors are one sentence."""

from __future__ import annotations

import pytest

from pipelinerl import registry
from pipelinerl.errors import RecipeError
from pipelinerl.registry import RegistryEntry

TABLES = {"engine": registry.ENGINES, "trainer": registry.TRAINERS, "verifier": registry.VERIFIERS}
#: The project's own components, without those that test modules register when they are imported.
OURS = [(kind, name) for kind, table in TABLES.items() for name, each in table.items() if "tests." not in each.target]


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_every_registered_engine_trainer_and_verifier_that_is_installed_can_be_loaded(kind: str, name: str) -> None:
    entry = TABLES[kind][name]
    if entry.installed:
        assert callable(registry.load(f"{kind}.type", TABLES[kind], name))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("zzz", "engine.type must be one of here, lacking, broken, got 'zzz'"),
        ("lacking", "engine.type 'lacking' needs no_such_library, which is not installed; pip install it"),
        ("broken", r"json/__init__.py has no 'no_such_thing'"),
    ],
)
def test_unavailable_name_in_the_registry_is_rejected_with_a_remedy(name: str, sentence: str) -> None:
    table = {
        "here": RegistryEntry("json:dumps"),
        "lacking": RegistryEntry("json:dumps", ("json", "no_such_library")),
        "broken": RegistryEntry("json:no_such_thing"),
    }
    with pytest.raises(RecipeError, match=sentence):
        registry.load("engine.type", table, name)


def test_looking_up_a_name_in_the_registry_imports_nothing() -> None:
    table = {"x": RegistryEntry("this.module.does.not:exist")}
    assert registry.find("engine.type", table, "x") is table["x"]


@pytest.mark.parametrize("target", ["", "json", ":x", "json:", "no_such_module:x", "json.no_such:x", "json:no.such"])
def test_reference_to_a_missing_module_or_attribute_is_rejected(target: str) -> None:
    with pytest.raises(RecipeError, match=r"module:attribute|cannot be imported|has no"):
        registry.resolve(target)
