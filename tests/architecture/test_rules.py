"""The house rules hold in every module, and each rule is shown to work: snippets break it, and snippets keep it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.architecture import rules
from tests.architecture.rules import Problems, cycles
from tests.architecture.tree import VALUES, Module, project, suite


class Rule(NamedTuple):
    """A rule, with snippets of code that break it and snippets that keep it; a snippet is (path, source)."""

    check: Callable[[Module], Problems]
    breaks: tuple[tuple[str, str], ...]
    keeps: tuple[tuple[str, str], ...] = ()


DOC = '"""What this is and what it promises to do."""\n'
FACTORY = "pipelinerl/system/http_client.py"
ENGINE, STREAM, OBJECTIVE = "pipelinerl/engines/a.py", "pipelinerl/streams/a.py", "pipelinerl/objective/a.py"

RULES = (
    Rule(
        rules.imports_go_down,
        breaks=(
            (STREAM, "from pipelinerl.engines import x"),
            (STREAM, "def f():\n    import pipelinerl.controller.service.api"),
            ("pipelinerl/observability/a.py", "from pipelinerl.errors import PipelineError"),
            ("inference_contract/a.py", "from trainer_contract.types import MicroBatch"),
            ("pipelinerl/roles/a.py", "from launch.supervisor import Supervisor"),
            ("trainer_contract/a.py", "from pipelinerl import errors"),
        ),
        keeps=(
            (ENGINE, "from pipelinerl.streams.stream import Stream\nfrom pipelinerl.engines import b"),
            ("pipelinerl/cli.py", "from launch.supervisor import Supervisor"),
            ("pipelinerl/commands/a.py", "from pipelinerl.roles.wiring import objective_of"),
        ),
    ),
    Rule(
        rules.plugins_stand_alone,
        breaks=(
            (STREAM, "from pipelinerl.plugins.jax.engine import engine"),
            ("pipelinerl/cli.py", "def f():\n    from pipelinerl.plugins.jax import splash"),
            ("pipelinerl/plugins/judge/a.py", "from pipelinerl.plugins.jax.engine import engine"),
        ),
        keeps=(
            ("pipelinerl/plugins/judge/a.py", "from pipelinerl.plugins.judge import b"),
            ("benchmarks/a.py", "from pipelinerl.plugins.judge import verifier"),
        ),
    ),
    Rule(
        rules.launch_knows_descriptions_of_roles_only,
        breaks=(("launch/a.py", "from pipelinerl.roles import engine"), ("launch/a.py", "import pipelinerl.streams.x")),
        keeps=(
            ("launch/a.py", "from pipelinerl.config.recipe import load\nfrom pipelinerl.errors import UserError"),
            ("launch/a.py", "from pipelinerl.system import http_client"),
            ("launch/a.py", "from pipelinerl.roles.role import Role\nfrom pipelinerl.roles import catalogue"),
        ),
    ),
    Rule(
        rules.rooms_are_known,
        breaks=(("pipelinerl/attic/a.py", ""), ("pipelinerl/attic.py", "")),
        keeps=((ENGINE, ""), ("pipelinerl/__init__.py", ""), *((f"pipelinerl/{name}.py", "") for name in VALUES)),
    ),
    Rule(
        rules.contracts_are_light,
        breaks=(("inference_contract/a.py", "import httpx"), ("trainer_contract/a.py", "import pydantic")),
        keeps=(("inference_contract/a.py", "import json\nfrom pydantic import Field"),),
    ),
    Rule(
        rules.heavy_libraries_stay_in_their_files,
        breaks=((ENGINE, "def f():\n    import torch"), ("pipelinerl/plugins/jax/engine/engine.py", "import torch")),
        keeps=(
            ("pipelinerl/engines/torch/engine.py", "import torch.nn\nfrom transformers import AutoModel"),
            ("benchmarks/a.py", "import torch"),
        ),
    ),
    Rule(
        rules.names_say_something,
        breaks=(
            ("pipelinerl/engines/utils.py", ""),
            ("pipelinerl/common/a.py", ""),
            (ENGINE, "class FleetManager: ..."),
        ),
        keeps=((ENGINE, "class Fleet: ..."),),
    ),
    Rule(
        rules.except_star_raises_nothing,
        breaks=((ENGINE, "try:\n    f()\nexcept* OSError as group:\n    raise group.exceptions[0] from None"),),
        keeps=((ENGINE, "try:\n    f()\nexcept* OSError as group:\n    failures.append(group)"),),
    ),
    Rule(
        rules.exceptions_are_named,
        breaks=(
            (ENGINE, "try:\n    f()\nexcept Exception:\n    pass"),
            (ENGINE, "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)"),
            (ENGINE, "with contextlib.suppress(Exception):\n    f()"),
        ),
        keeps=(
            (ENGINE, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
            ("pipelinerl/roles/a.py", "try:\n    f()\nexcept Exception:\n    log()"),
            (ENGINE, "try:\n    f()\nexcept BaseException as e:\n    future.set_exception(e)"),
        ),
    ),
    Rule(
        rules.modules_open_with_what_they_are,
        breaks=((ENGINE, "x = 1"), (ENGINE, '"""An engine."""')),
        keeps=((ENGINE, DOC),),
    ),
    Rule(
        rules.data_is_never_code,
        breaks=(
            (ENGINE, "import pickle"),
            (ENGINE, "eval(text)"),
            (ENGINE, "torch.load(path, weights_only=False)"),
            (ENGINE, "np.load(path, allow_pickle=True)"),
        ),
        keeps=((ENGINE, "model.eval()\ntorch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)"),),
    ),
    Rule(
        rules.randomness_has_one_source,
        breaks=tuple(
            (ENGINE, x) for x in ("import random", "np.random.rand(3)", "torch.manual_seed(0)", "uuid.uuid4()")
        ),
        keeps=((ENGINE, "def f(g: np.random.Generator): g.normal()"), ("pipelinerl/rng.py", "np.random.PCG64(1)")),
    ),
    Rule(
        rules.implementation_is_not_inherited,
        breaks=((ENGINE, "class A(TorchEngine): ..."), (ENGINE, "class A(torch.nn.Module): ...")),
        keeps=(
            (ENGINE, "class A(Protocol): ...\nclass B(StrEnum): ...\nclass C(PipelineError): ...\nclass D(Wire): ..."),
            (ENGINE, "class A(Engine, Protocol): ..."),
        ),
    ),
    Rule(
        rules.waits_have_deadlines,
        breaks=((ENGINE, "httpx.Client(timeout=None)"), (ENGINE, "subprocess.run(['x'])")),
        keeps=((ENGINE, "subprocess.run(['x'], timeout=3)"),),
    ),
    Rule(
        rules.proxies_are_left_alone,
        breaks=(
            (ENGINE, "httpx.post(url, trust_env=False)"),
            ("launch/a.py", "with httpx.Client(base_url=url, timeout=3) as http:\n    http.get('/')"),
            (FACTORY, "httpx.Client(base_url=url)"),
            (ENGINE, "from httpx import post"),
            (ENGINE, "import http.client\nhttp.client.HTTPSConnection('host')"),
            (FACTORY, "aiohttp.ClientSession(trust_env=True)"),
            (ENGINE, "urllib.request.urlopen(url)"),
            (ENGINE, "import requests"),
        ),
        keeps=(
            (FACTORY, "httpx.Client(trust_env=False)\naiohttp.ClientSession()\nhttp.client.HTTPConnection('host')"),
            (ENGINE, "http.get('/status')\nwith http_client.session(url) as http: ..."),
        ),
    ),
)

TEST_RULES = (
    Rule(
        rules.nothing_is_mocked,
        breaks=(("tests/a.py", "from unittest.mock import patch"), ("tests/a.py", "def test_a(mocker): ...")),
        keeps=(("tests/a.py", "def test_a(monkeypatch): monkeypatch.setenv('A', 'b')"),),
    ),
    Rule(rules.modules_open_with_what_they_are, breaks=(("tests/a.py", "x = 1"),), keeps=(("tests/a.py", DOC),)),
)


@pytest.mark.parametrize(
    ("rule", "modules"),
    [*((rule, project) for rule in RULES), *((rule, suite) for rule in TEST_RULES)],
    ids=lambda value: value.check.__name__ if isinstance(value, Rule) else value.__name__,
)
def test_every_module_follows_each_house_rule(rule, modules):
    broken = [f"{module.path}: {problem}" for module in modules() for problem in rule.check(module)]
    assert not broken, "\n".join([rule.check.__doc__ or "", *broken])


@pytest.mark.parametrize("rule", (*RULES, *TEST_RULES), ids=lambda rule: rule.check.__name__)
def test_each_house_rule_rejects_its_examples_of_bad_code_and_accepts_those_of_good_code(rule):
    assert rule.breaks
    for path, source in rule.breaks:
        assert list(rule.check(Module(path, source))), f"it misses, in {path}:\n{source}"
    for path, source in rule.keeps:
        assert not list(rule.check(Module(path, source))), f"it refuses, in {path}:\n{source}"


def test_product_modules_have_no_import_cycles():
    assert cycles(project()) == []


def test_import_cycles_and_relative_imports_are_detected():
    a = Module("launch/a.py", "def f():\n    from launch.b import x")
    b = Module("launch/b.py", "import launch.c")
    c = Module("launch/c.py", "from launch import a")
    assert cycles((a, b, c)) == [("launch.a", "launch.b", "launch.c")]
    assert cycles((a, b)) == []
    with pytest.raises(AssertionError, match="absolute name"):
        _ = Module("launch/a.py", "from . import b").imports


def test_files_in_the_exception_lists_of_the_house_rules_exist():
    lists = (rules.HEAVY_ALLOWED, rules.RANDOMNESS_ALLOWED, rules.PICKLE_ALLOWED, rules.BASES_ALLOWED, rules.OPENS_HTTP)
    assert {path for each in lists for path in each} <= {module.path for module in project()}
