"""Contracts, configuration, registry, objective and launcher import no heavy library (tested in new interpreters)."""

import json
import subprocess
import sys

import pytest

from tests.architecture.rules import HEAVY
from tests.architecture.tree import ROOT, project, room_of
from tests.patience import PATIENCE_S

_SCRIPT = """
import importlib, json, sys
modules, heavy = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
print(json.dumps(sorted(set(heavy) & set(sys.modules))))
"""


def _loaded(modules, watched):
    """Return the names in `watched` that a new interpreter has loaded after it imported `modules`."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps([modules, sorted(watched)])]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    return list(json.loads(answer.stdout))


def _modules(*rooms):
    names = [module.name for module in project() if "conformance" not in module.path]
    return [name for name in names if room_of(name) in rooms]


@pytest.mark.parametrize(
    "modules",
    [
        _modules("inference_contract"),
        _modules("trainer_contract"),
        ["pipelinerl.config.recipe", "pipelinerl.registry"],
        _modules("objective", "values", "observability"),
        [name for name in _modules("launch") if name != "launch.reaper"],
    ],
    ids=["inference_contract", "trainer_contract", "config_registry", "objective", "launch"],
)
def test_light_modules_import_no_heavy_library(modules):
    assert modules
    assert _loaded(modules, HEAVY) == []
