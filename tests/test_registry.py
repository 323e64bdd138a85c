"""The registry maps names in recipes to components, imported only when looked up; errors are one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipelinerl import registry
from pipelinerl.component import Component, imported, missing_packages
from pipelinerl.errors import RecipeError

KINDS: tuple[registry.Components[Any], ...] = (
    registry.ENGINES, registry.TRAINERS, registry.SOURCES, registry.VERIFIERS, registry.TOOLS, registry.ENVIRONMENTS,
    registry.TRACKERS, registry.TRANSPORTS, registry.COMMANDS, registry.NEEDS,
)  # fmt: skip


FURTHER = ("check_options", "look", "check_problem", "reference_answer", "probe", "check", "rank", "fetch", "settle")


@pytest.mark.parametrize(("components", "name"), [(kind, name) for kind in KINDS for name in kind])
def test_every_registered_component_that_is_installed_can_be_loaded(components, name):
    component = components[name]
    if not missing_packages(component):
        assert callable(registry.load("engine.type", components, name))
    further = [getattr(component, key, "") for key in FURTHER]
    assert all(callable(imported(reference)) for reference in further if reference)


HERE = Component(build="json:dumps")
TABLE: Mapping[str, Component] = {
    "here": HERE,
    "lacking": Component(build="json:dumps", needs=("json", "no_such_library")),
    "broken": Component(build="json:no_such_thing"),
}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("zzz", "engine.type must be one of here, lacking, broken, got 'zzz'"),
        ("lacking", "engine.type 'lacking' needs no_such_library, which is not installed; pip install it"),
        ("broken", r"json/__init__.py has no 'no_such_thing'"),
    ],
)
def test_unavailable_name_in_the_registry_is_rejected_with_a_remedy(name, sentence):
    with pytest.raises(RecipeError, match=sentence):
        registry.load("engine.type", TABLE, name)


def test_looking_up_a_component_does_not_import_what_it_builds():
    table = {"x": Component(build="this.module.does.not:exist")}
    assert registry.find("engine.type", table, "x") is table["x"]


def test_entry_points_add_components_of_their_kind_and_replace_none_of_ours(monkeypatch):
    named = {"verifier.regex": f"{__name__}:HERE", "verifier.ours": "no.such:thing", "engine.other": "no.such:thing"}
    points = tuple(registry.metadata.EntryPoint(*each, registry.ENTRY_POINTS) for each in named.items())
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    components = registry.Components("verifier", Component, {"ours": f"{__name__}:HERE"})
    assert sorted(components) == ["ours", "regex"]
    assert components["regex"] is components["ours"] is HERE


@pytest.mark.parametrize("reference", ["", "json", ":x", "json:", "no_such_module:x", "json.no_such:x", "json:no.such"])
def test_reference_to_a_missing_module_or_attribute_is_rejected(reference):
    with pytest.raises(RecipeError, match=r"module:attribute|cannot be imported|has no"):
        imported(reference)
