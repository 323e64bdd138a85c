"""Every rule with snippets that break it and snippets that keep it, so that each rule is shown to work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.architecture.rules import (
    Problems,
    contracts_are_light,
    data_is_never_code,
    except_star_raises_nothing,
    exceptions_are_named,
    heavy_libraries_stay_in_their_files,
    implementation_is_not_inherited,
    imports_go_down,
    launch_knows_descriptions_of_roles_only,
    modules_open_with_what_they_are,
    names_say_something,
    nothing_is_mocked,
    plugins_stand_alone,
    proxies_are_left_alone,
    randomness_has_one_source,
    rooms_are_known,
    waits_have_deadlines,
)
from tests.architecture.tree import VALUES, Module


@dataclass(frozen=True)
class Rule:
    """A rule, with snippets of code that break it and snippets that keep it; a snippet is (path, source)."""

    check: Callable[[Module], Problems]
    breaks: tuple[tuple[str, str], ...]
    keeps: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The rule's name, which is the id of its test."""
        return self.check.__name__


DOC = '"""What this is and what it promises to do."""\n'
FACTORY = "pipelinerl/system/http_client.py"
ENGINE, STREAM, OBJECTIVE = "pipelinerl/engines/a.py", "pipelinerl/streams/a.py", "pipelinerl/objective/a.py"

RULES = (
    Rule(
        imports_go_down,
        breaks=(
            (STREAM, "from pipelinerl.engines import x"),
            (STREAM, "from pipelinerl.weights.publisher import Publisher"),
            (STREAM, "def f():\n    import pipelinerl.controller.service.api"),
            ("pipelinerl/observability/a.py", "from pipelinerl.errors import PipelineError"),
            ("inference_contract/a.py", "from trainer_contract.types import MicroBatch"),
            ("pipelinerl/roles/a.py", "from launch.supervisor import Supervisor"),
            ("pipelinerl/roles/a.py", "def f():\n    from pipelinerl.commands.check import findings"),
            ("pipelinerl/commands/a.py", "from pipelinerl.cli import app"),
            ("trainer_contract/a.py", "from pipelinerl import errors"),
        ),
        keeps=(
            (ENGINE, "from pipelinerl.streams.stream import Stream\nfrom pipelinerl.engines import b"),
            ("pipelinerl/cli.py", "from launch.supervisor import Supervisor"),
            ("pipelinerl/roles/a.py", "from pipelinerl.config.recipe import RunConfig"),
            ("pipelinerl/commands/a.py", "from pipelinerl.roles.wiring import objective_of"),
        ),
    ),
    Rule(
        plugins_stand_alone,
        breaks=(
            (STREAM, "from pipelinerl.plugins.jax.engine import engine"),
            ("pipelinerl/cli.py", "def f():\n    from pipelinerl.plugins.jax import splash"),
            ("launch/a.py", "import pipelinerl.plugins.judge.verifier"),
            ("pipelinerl/plugins/judge/a.py", "from pipelinerl.plugins.jax.engine import engine"),
        ),
        keeps=(
            ("pipelinerl/plugins/judge/a.py", "from pipelinerl.plugins.judge import b"),
            ("pipelinerl/plugins/judge/a.py", "from pipelinerl.roles.role import Role"),
            ("benchmarks/a.py", "from pipelinerl.plugins.judge import verifier"),
        ),
    ),
    Rule(
        launch_knows_descriptions_of_roles_only,
        breaks=(("launch/a.py", "from pipelinerl.roles import engine"), ("launch/a.py", "import pipelinerl.streams.x")),
        keeps=(
            ("launch/a.py", "from pipelinerl.config.recipe import load\nfrom pipelinerl.errors import UserError"),
            ("launch/a.py", "from pipelinerl.system import http_client"),
            ("launch/a.py", "from pipelinerl.roles.role import Role\nfrom pipelinerl.roles import catalogue"),
        ),
    ),
    Rule(
        rooms_are_known,
        breaks=(("pipelinerl/attic/a.py", ""), ("pipelinerl/attic.py", "")),
        keeps=((ENGINE, ""), ("pipelinerl/__init__.py", ""), *((f"pipelinerl/{name}.py", "") for name in VALUES)),
    ),
    Rule(
        contracts_are_light,
        breaks=(("inference_contract/a.py", "import httpx"), ("trainer_contract/a.py", "import pydantic")),
        keeps=(("inference_contract/a.py", "import json\nfrom pydantic import Field"),),
    ),
    Rule(
        heavy_libraries_stay_in_their_files,
        breaks=((ENGINE, "def f():\n    import torch"), ("pipelinerl/plugins/jax/engine/engine.py", "import torch")),
        keeps=(
            ("pipelinerl/engines/torch/engine.py", "import torch.nn\nfrom transformers import AutoModel"),
            ("benchmarks/a.py", "import torch"),
        ),
    ),
    Rule(
        names_say_something,
        breaks=(
            ("pipelinerl/engines/utils.py", ""),
            ("pipelinerl/common/a.py", ""),
            ("pipelinerl/engines/engine_v2.py", ""),
            (ENGINE, "class FleetManager: ..."),
        ),
        keeps=((ENGINE, "class Fleet: ..."),),
    ),
    Rule(
        except_star_raises_nothing,
        breaks=((ENGINE, "try:\n    f()\nexcept* OSError as group:\n    raise group.exceptions[0] from None"),),
        keeps=((ENGINE, "try:\n    f()\nexcept* OSError as group:\n    failures.append(group)"),),
    ),
    Rule(
        exceptions_are_named,
        breaks=(
            (ENGINE, "try:\n    f()\nexcept Exception:\n    pass"),
            (ENGINE, "try:\n    f()\nexcept:\n    raise ValueError"),
            (ENGINE, "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)"),
            (ENGINE, "with contextlib.suppress(Exception):\n    f()"),
        ),
        keeps=(
            (ENGINE, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
            ("pipelinerl/roles/a.py", "try:\n    f()\nexcept Exception:\n    log()"),
            (ENGINE, "try:\n    f()\nexcept OSError:\n    pass"),
            (ENGINE, "try:\n    f()\nexcept BaseException as e:\n    future.set_exception(e)"),
        ),
    ),
    Rule(
        modules_open_with_what_they_are,
        breaks=((ENGINE, "x = 1"), (ENGINE, '"""An engine."""')),
        keeps=((ENGINE, DOC),),
    ),
    Rule(
        data_is_never_code,
        breaks=(
            (ENGINE, "import pickle"),
            (ENGINE, "eval(text)"),
            (ENGINE, "torch.load(path)"),
            (ENGINE, "torch.load(path, weights_only=False)"),
            (ENGINE, "np.load(path, allow_pickle=True)"),
        ),
        keeps=((ENGINE, "model.eval()\ntorch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)"),),
    ),
    Rule(
        randomness_has_one_source,
        breaks=(
            (ENGINE, "import random"),
            (ENGINE, "x = np.random.rand(3)"),
            (ENGINE, "g = np.random.default_rng(0)"),
            (ENGINE, "torch.manual_seed(0)"),
            (ENGINE, "torch.multinomial(p, 1)"),
            (ENGINE, "uuid.uuid4()"),
        ),
        keeps=(
            (ENGINE, "def f(g: np.random.Generator): return g.normal()"),
            ("pipelinerl/rng.py", "np.random.PCG64(1)"),
        ),
    ),
    Rule(
        implementation_is_not_inherited,
        breaks=(
            (ENGINE, "class A(TorchEngine): ..."),
            (ENGINE, "class A(torch.nn.Module): ..."),
            (ENGINE, "class A(Base[int]): ..."),
        ),
        keeps=(
            (ENGINE, "class A(Protocol): ...\nclass B(StrEnum): ...\nclass C(PipelineError): ...\nclass D(Wire): ..."),
            (ENGINE, "class A(Engine, Protocol): ..."),
        ),
    ),
    Rule(
        waits_have_deadlines,
        breaks=((ENGINE, "httpx.Client(timeout=None)"), (ENGINE, "subprocess.run(['x'])")),
        keeps=((ENGINE, "subprocess.run(['x'], timeout=3)"),),
    ),
    Rule(
        proxies_are_left_alone,
        breaks=(
            (ENGINE, "httpx.post(url, trust_env=False)"),
            (ENGINE, "httpx.AsyncClient(trust_env=True)"),
            ("launch/a.py", "with httpx.Client(base_url=url, timeout=3) as http:\n    http.get('/')"),
            (FACTORY, "httpx.Client(base_url=url)"),
            (ENGINE, "from httpx import post"),
            (ENGINE, "from http.client import HTTPConnection"),
            (ENGINE, "import http.client\nhttp.client.HTTPSConnection('host')"),
            (ENGINE, "aiohttp.ClientSession(connector=connector)"),
            (FACTORY, "aiohttp.ClientSession(trust_env=True)"),
            (ENGINE, "urllib.request.urlopen(url)"),
            (ENGINE, "urllib.request.build_opener(urllib.request.ProxyHandler({}))"),
            (ENGINE, "import requests"),
        ),
        keeps=(
            (FACTORY, "httpx.Client(trust_env=False)\naiohttp.ClientSession()\nhttp.client.HTTPConnection('host')"),
            (ENGINE, "http.get('/status')\nwith http_client.session(url) as http: ..."),
            (ENGINE, "def f(http: httpx.Client) -> httpx.Response: ..."),
        ),
    ),
)

TEST_RULES = (
    Rule(
        nothing_is_mocked,
        breaks=(
            ("tests/a.py", "from unittest.mock import patch"),
            ("tests/a.py", "from unittest import mock"),
            ("tests/a.py", "def test_a(mocker): ..."),
        ),
        keeps=(("tests/a.py", "def test_a(monkeypatch): monkeypatch.setenv('A', 'b')"),),
    ),
    Rule(
        modules_open_with_what_they_are,
        breaks=(("tests/a.py", "x = 1"),),
        keeps=(("tests/a.py", DOC),),
    ),
)
