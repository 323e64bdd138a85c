"""House rules that a machine can check (DESIGN sections 3, 11, 12); each maps a module to its violations."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache

from tests.architecture.tree import FLOORS, project, room_of

HEAVY = frozenset(
    {
        "torch", "jax", "jaxlib", "vllm", "accelerate", "transformers", "ray", "sglang", "optax", "tensorstore",
        "deepspeed", "peft", "textual",
    }
)  # fmt: skip

#: Files that may import a heavy library although its name is not in the path, each with its reason.
HEAVY_ALLOWED = {
    "pipelinerl/models/checkpoint.py": "Hugging Face checkpoints are transformers'",
    "pipelinerl/models/weight_reader.py": "of which tensors a parameter is made is transformers' to say",
    "pipelinerl/models/weight_writer.py": "how stored tensors become parameters is transformers' to undo",
    "pipelinerl/plugins/warmstart/tiny_decoder.py": "makes and trains Hugging Face models of debug size",
    "pipelinerl/models/tokenizer.py": "chat templates are transformers'",
    "pipelinerl/plugins/external_engines/vllm/transfer.py": "a vLLM worker's model is torch's",
    "pipelinerl/weights/broadcast/collective.py": "torch.distributed is the collective",
    "pipelinerl/weights/broadcast/sender.py": "puts parameters into the buffers that it sends",
}

#: Files that may catch every exception: main functions of processes, the supervisor, and files that run foreign code.
BROAD_EXCEPT_ALLOWED = (
    "pipelinerl/roles/",
    "pipelinerl/commands/",
    *("pipelinerl/plugins/trackers/role.py", "pipelinerl/plugins/watch/"),  # they outlive a broken run
    "pipelinerl/cli",
    "launch/supervisor.py",
    "benchmarks/__main__.py",
    "benchmarks/gpu_check.py",
    "trainer_contract/conformance/__init__.py",
    *("pipelinerl/system/references.py", "pipelinerl/system/returned_values.py"),  # user code may raise any exception
    *("pipelinerl/verifiers/user_code.py", "pipelinerl/verifiers/verdicts.py"),
    "pipelinerl/verifiers/worker_process.py",  # the main function of a process; judging code may raise any exception
    "pipelinerl/actor/actor.py",  # an exception of user code fails its order, and not the actor
    "pipelinerl/models/directory_files.py",  # libraries may raise any exception when they read a user's files
    "pipelinerl/engines/batching/decode_loop.py",  # array libraries may raise any exception
    "pipelinerl/plugins/oubliette/guest/program.py",  # the main function of a process that runs foreign programs
    "pipelinerl/verifiers/group_filter.py",
    "pipelinerl/plugins/math_answer/expressions.py",  # math-verify's parser raises plain `Exception` for a syntax error
    "pipelinerl/plugins/episodes/verifiers_host.py",  # tasksets may raise any exception
    "pipelinerl/plugins/episodes/episode_host.py",  # the main function of a process; user code may raise any exception
)

#: Files that may draw random numbers without `pipelinerl.rng`, each with its reason.
RANDOMNESS_ALLOWED = {
    "pipelinerl/rng.py": "the source",
    "launch/run_directory.py": "secrets must not be reproducible",
    "pipelinerl/trainers/torch/loading.py": "seeds torch from rng, for models that draw in their forward",
    "pipelinerl/plugins/torch_mesh/mesh_worker.py": "seeds torch from rng, for the dropout of adapters",
    "pipelinerl/plugins/episodes/episode.py": "secrets must not be reproducible",
    "pipelinerl/roles/process.py": "secrets must not be reproducible",
    "pipelinerl/plugins/watch/access.py": "secrets must not be reproducible",
    "pipelinerl/streams/embedded_redis.py": "secrets must not be reproducible",
    "pipelinerl/training/rollouts/rollout_reader.py": "each incarnation of a trainer has a name of its own",
    "pipelinerl/controller/service/journal.py": "each writer must have a name that no other had",
}

#: Files that may name pickle, each with its reason.
PICKLE_ALLOWED = {"benchmarks/queue.py": "measures what others do"}

CODE_ALLOWED = {
    "pipelinerl/plugins/oubliette/guest/program.py": "runs in a guest, and becomes the program that it runs"
}

#: For each file, the third-party classes from which its classes inherit because a library requires that.
BASES_ALLOWED: dict[str, frozenset[str]] = {
    "pipelinerl/cli.py": frozenset({"TyperGroup"}),
    "inference_contract/conformance/pull_checks.py": frozenset({"BaseHTTPRequestHandler"}),
    "pipelinerl/plugins/episodes/verifiers_host.py": frozenset({"Harness", "HarnessConfig"}),
    "pipelinerl/plugins/watch/top/textual_app.py": frozenset({"App", "Horizontal"}),
    "pipelinerl/numerics/torch_logprobs.py": frozenset({"Function"}),
    "pipelinerl/system/connection.py": frozenset({"HttpToolsProtocol"}),
    "pipelinerl/trainers/torch/packed_model.py": frozenset({"Module"}),
    "pipelinerl/trainers/torch/packed/segments.py": frozenset({"Function"}),
    "pipelinerl/trainers/torch/packed/sequence_parallel.py": frozenset({"Function"}),
    "pipelinerl/trainers/torch/packed/shared_beginnings.py": frozenset({"Function"}),
    "pipelinerl/trainers/torch/packed/varlen.py": frozenset({"Function"}),
}

BASES = frozenset(
    {
        "Protocol", "Generic", "Mapping", "Enum", "StrEnum", "IntEnum", "Flag", "IntFlag", "NamedTuple", "TypedDict",
        "BaseModel", "Struct", "Exception", "ValueError", "RuntimeError", "OSError", "TimeoutError",
        "LookupError", "KeyError",
    }
)  # fmt: skip

#: Ways to open HTTP connections: classes and functions of libraries, and whole libraries with no other purpose.
HTTP_OPENERS = frozenset(
    f"{library}.{name}"
    for library, names in {
        "httpx": "Client AsyncClient HTTPTransport AsyncHTTPTransport request stream get head options post put patch "
        "delete",
        "aiohttp": "ClientSession TCPConnector UnixConnector request",
        "http.client": "HTTPConnection HTTPSConnection",
        "urllib.request": "urlopen build_opener OpenerDirector urlretrieve",
    }.items()
    for name in names.split()
)
HTTP_LIBRARIES_NOT_USED = frozenset({"requests", "urllib3", "pycurl", "httplib2"})

#: Files that open HTTP connections, each with its reason.
OPENS_HTTP = {
    "pipelinerl/system/http_client.py": "the factory",
    "inference_contract/conformance/session.py": "the kit stands alone, and checks engines that are not ours",
}

#: Prefixes of the names that the launcher may import from rooms (packages) that it otherwise must not import.
LAUNCH_ALLOWED = (
    "pipelinerl.registry",
    "pipelinerl.component.",
    "pipelinerl.config.recipe.",
    "pipelinerl.roles.catalogue",
    "pipelinerl.roles.role.",
)

Problems = Iterator[str]


def imports_go_down(module):
    """A room (package) imports only rooms on lower floors (layers of the architecture).

    Rooms on the same floor do not import each other. Every room may import the contracts.
    """
    here = room_of(module.name)
    if here is None:
        return
    for target in module.imports:
        there = room_of(target)
        if there is None or there == here or there == "plugins":
            continue  # `plugins_stand_alone` covers plug-ins
        if module.name.startswith("pipelinerl.cli") and there == "launch":
            continue  # `pipelinerl run` is the launcher's command line
        if FLOORS[there] >= FLOORS[here]:
            yield f"{here} (floor {FLOORS[here]}) must not import {target} ({there}, floor {FLOORS[there]})"


def plugins_stand_alone(module):
    """The core imports no plug-in, and a plug-in imports no other: each can be left out."""
    if module.path.startswith("benchmarks/"):
        return
    here = _plugin_of(module.name)
    for target in module.imports:
        there = _plugin_of(target)
        if there and there != here:
            yield f"{target} belongs to the plug-in {there}: reach it through the registry"


def _plugin_of(dotted):
    return [*dotted.split("."), "", ""][2] if dotted.startswith("pipelinerl.plugins.") else ""


def launch_knows_descriptions_of_roles_only(module):
    """The launcher imports the descriptions of roles, and no code that a role runs.

    It may also import configuration, observability, value types, and `system`, which has nothing to do with RL.
    """
    if room_of(module.name) != "launch":
        return
    known = (None, "launch", "observability", "system", "values")
    for target in module.imports:
        allowed = room_of(target) in known or target.startswith(LAUNCH_ALLOWED)
        if not allowed:
            yield f"launch must not import {target}"


def rooms_are_known(module):
    """Every file below `pipelinerl/` belongs to a room of DESIGN section 3."""
    if module.name.startswith("pipelinerl.") and room_of(module.name) is None:
        yield f"{module.name} is in no room of DESIGN section 3"


def contracts_are_light(module):
    """Outside their conformance kits, inference_contract imports only pydantic, and trainer_contract only numpy."""
    light = {"inference_contract": {"pydantic"}, "trainer_contract": {"numpy"}}.get(module.name.split(".")[0])
    if light is None or "conformance" in module.path:
        return
    for target in module.imports:
        top = target.split(".")[0]
        if top not in light and top not in sys.stdlib_module_names and top != module.name.split(".")[0]:
            yield f"{module.name} must not import {target}"


def heavy_libraries_stay_in_their_files(module):
    """A file that imports a heavy library, such as torch, has its name in the path, or is in `HEAVY_ALLOWED`."""
    if module.path.startswith("benchmarks/") or module.path in HEAVY_ALLOWED or "conformance" in module.path:
        return
    words = set(re.split(r"[_/.]", module.path))
    # Libraries on top of torch or jax: a file that is named for torch or jax may import them, too.
    kin = dict.fromkeys(("transformers", "accelerate", "deepspeed", "peft"), "torch")
    kin |= dict.fromkeys(("optax", "tensorstore"), "jax")
    for target in module.imports:
        top = target.split(".")[0]
        if top in HEAVY and not {top, kin.get(top, top)} & words:
            yield f"{target} is imported in a file that is neither named for it nor on the list"


def names_say_something(module):
    """No path and no class name contains utils, helpers, common, manager, misc or v2."""
    empty = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "v2"}
    for word in re.split(r"[_/.]", module.path):
        if word in empty:
            yield f"the path says {word!r}, which says nothing"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and re.search(r"(Util|Helper|Manager|Common|Misc|V2)s?$", node.name):
            yield f"line {node.lineno}: class {node.name}"


def exceptions_are_named(module):
    """Only listed files catch every exception, unless the handler raises it again or passes it to a future."""
    if module.path.startswith(BROAD_EXCEPT_ALLOWED):
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if _is_broad(node.type) and not again and not _hands_on(node):
            yield f"line {node.lineno}: name the exceptions, or raise again at the end"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _dotted(node.func).endswith("suppress") and any(map(_is_broad, node.args)):
            yield f"line {node.lineno}: name the exceptions"


def except_star_raises_nothing(module):
    """No handler of `except*` raises an exception: before Python 3.11.4, it would arrive wrapped in a group."""
    for node in ast.walk(module.tree):
        for handler in node.handlers if isinstance(node, ast.TryStar) else ():
            if any(isinstance(each, ast.Raise) for each in ast.walk(handler)):
                yield f"line {handler.lineno}: catch the ExceptionGroup, split it and raise outside of `except*`"


def modules_open_with_what_they_are(module):
    """Every module has a docstring whose first line is a sentence."""
    text = ast.get_docstring(module.tree) or ""
    if len(text.split()) < 5:
        yield "the module must open with what it is and what it promises"


def data_is_never_code(module):
    """No module uses pickle, eval or exec, or a loader that would unpickle."""
    for target in module.imports:
        if module.path not in PICKLE_ALLOWED and target.split(".")[0] in {
            "pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
        }:  # fmt: skip
            yield f"imports {target}"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called, given = _dotted(node.func), {word.arg: word.value for word in node.keywords}
        if module.path not in CODE_ALLOWED and called in {"eval", "exec", "builtins.eval", "builtins.exec"}:
            yield f"line {node.lineno}: {called}"
        if called in {"yaml.load", "yaml.unsafe_load"}:
            yield f"line {node.lineno}: {called}"
        if called == "torch.load" and not _is_true(given.get("weights_only")):
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if _is_true(given.get("allow_pickle")):
            yield f"line {node.lineno}: allow_pickle=True"


def randomness_has_one_source(module):
    """Random numbers come from `pipelinerl.rng`, so that a run can be repeated."""
    if module.path in RANDOMNESS_ALLOWED:
        return
    for target in module.imports:
        if target.split(".")[0] in {"random", "secrets"} or target.startswith("numpy.random"):
            yield f"imports {target}"
    drawn = re.compile(
        r"(np|numpy)\.random\.(?!Generator$)\w+|torch\.(manual_seed|seed|rand\w*|normal|multinomial|bernoulli)"
        r"|uuid\.uuid[14]|os\.urandom"
    )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and drawn.fullmatch(_dotted(node.func)):
            yield f"line {node.lineno}: {_dotted(node.func)}; draw it from pipelinerl.rng"


def nothing_is_mocked(module):
    """No test uses a mock: tests use real objects or verified fakes."""
    for target in module.imports:
        if target.startswith("unittest.mock") or target.split(".")[0] in {"mock", "pytest_mock"}:
            yield f"imports {target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.arg) and node.arg == "mocker":
            yield f"line {node.lineno}: the mocker fixture"


def implementation_is_not_inherited(module):
    """Classes inherit only from protocols, enums, errors and records, not from classes with methods."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef) or any(_dotted(base) == "Protocol" for base in node.bases):
            continue
        for base in node.bases:
            name = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            short = name.split(".")[-1]
            known = BASES | _inheritable() | BASES_ALLOWED.get(module.path, set())
            if short not in known and not short.endswith(("Error", "Exception")):
                yield f"line {node.lineno}: {node.name} inherits from {name}"


def waits_have_deadlines(module):
    """No call uses `timeout=None`, and every wait for a subprocess has a timeout."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: word.value for word in node.keywords}
        timeout = given.get("timeout")
        if isinstance(timeout, ast.Constant) and timeout.value is None:
            yield f"line {node.lineno}: timeout=None waits for ever"
        if _dotted(node.func) in {"subprocess.run", "subprocess.check_output", "subprocess.check_call"} and not timeout:
            yield f"line {node.lineno}: {_dotted(node.func)} without a timeout"


def proxies_are_left_alone(module):
    """HTTP connections come from `system/http_client.py`, which sends the run's token to its peers and to no proxy.

    Files that open connections in another way are listed in `OPENS_HTTP`, and pass `trust_env=False`.
    """
    listed = module.path in OPENS_HTTP
    for target in module.imports:
        if target in HTTP_OPENERS:
            yield f"{target} must be called by that name, so that this rule sees it"
        if target.split(".")[0] in HTTP_LIBRARIES_NOT_USED:
            yield f"imports {target}; pipelinerl.system.http_client opens connections"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called, trust = _dotted(node.func), {word.arg: word.value for word in node.keywords}.get("trust_env")
        if called in HTTP_OPENERS and not listed:
            yield f"line {node.lineno}: {called}; open it by pipelinerl.system.http_client"
        trusting = not (isinstance(trust, ast.Constant) and trust.value is False)
        if called.startswith("httpx.") and called in HTTP_OPENERS and trusting:
            yield f"line {node.lineno}: {called} without trust_env=False"
        if _is_true(trust) or called.startswith("urllib.request."):
            yield f"line {node.lineno}: {called} asks the environment for a proxy"


def _is_broad(node):
    if isinstance(node, ast.Tuple):
        return any(map(_is_broad, node.elts))
    return node is None or _dotted(node).split(".")[-1] in ("Exception", "BaseException")


def _hands_on(handler):
    """Return True if the handler passes the exception that it has caught to `set_exception` of a future."""
    return any(
        isinstance(node, ast.Call)
        and _dotted(node.func).endswith(".set_exception")
        and [_dotted(argument) for argument in node.args] == [handler.name]
        for node in ast.walk(handler)
    )


def _is_true(node):
    return isinstance(node, ast.Constant) and node.value is True


def _dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def _inheritable():
    """Return the names of the project's protocols, whose methods may be defaults, and of classes without methods."""
    return frozenset(
        node.name
        for module in project()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and (
            any(_dotted(base) == "Protocol" for base in node.bases)
            or not any(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        )
    )


def cycles(modules):
    """Return each import cycle between modules once, as the module names from the alphabetically first one on."""
    names = {module.name for module in modules}
    graph = {
        module.name: sorted({known for target in module.imports if (known := _known(target, names))} - {module.name})
        for module in modules
    }
    found: set[tuple[str, ...]] = set()
    done: set[str] = set()

    def visit(name, path):
        if name in path:
            circle = path[path.index(name) :]
            least = circle.index(min(circle))
            found.add(tuple(circle[least:] + circle[:least]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return sorted(found)


def _known(target, names):
    """Return the module that `from a.b import c` reads: a.b.c if that is a module, else a.b."""
    parent = target.rpartition(".")[0]
    return target if target in names else parent if parent in names else None
