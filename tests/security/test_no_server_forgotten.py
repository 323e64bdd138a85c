"""Every server of the product is attacked by the tests of this folder, and requires authorisation.

The source files are searched for servers: a new server fails these tests until `servers.application` builds it.
"""

import ast

import pytest

from tests.architecture.tree import Module, project
from tests.security.servers import SERVERS, application

#: Folders whose code serves in production. Benchmarks are excluded because only developers start them.
PRODUCT = ("inference_contract/", "trainer_contract/", "pipelinerl/", "launch/")
#: The only module of the product that may start a server; it adds the authorisation check and the connection limits.
SERVES = "pipelinerl/system/http_service.py"
#: Calls that build an application. Below: calls and modules that serve one without the authorisation check.
MAKES = frozenset({"FastAPI", "Starlette", "Litestar", "Quart", "Flask", "make_asgi_app", "make_wsgi_app"})
OTHER_WAYS = frozenset(
    {"start_server", "start_http_server", "start_wsgi_server", "make_server", "HTTPServer", "ThreadingHTTPServer",
     "TCPServer", "ThreadingTCPServer", "AppRunner", "run_app", "create_asgi_server"}
)  # fmt: skip
OTHER_MODULES = ("uvicorn", "hypercorn", "http.server", "socketserver", "wsgiref", "xmlrpc.server", "aiohttp.web")
#: Modules that may serve without the authorisation check: the connection limits in front of the server, and the
#: conformance kit, which serves weights while the engine under test pulls them.
MAY = frozenset({SERVES, "pipelinerl/system/connection.py", "inference_contract/conformance/pull_checks.py"})

#: The gateway has a key per episode instead of a token; `tests/plugins/episodes/test_gateway.py` attacks it.
ATTACKED_ELSEWHERE = frozenset({"pipelinerl/plugins/episodes/gateway.py"})


def calls(module):
    """Yield the name of each function that the module calls, without the module or object before the dot."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def makes_an_application(module):
    return not MAKES.isdisjoint(calls(module))


def other_ways(modules):
    """Yield the modules that start a server without the authorisation check and the connection limits."""
    for module in (each for each in modules if each.path not in MAY):
        for name in sorted(OTHER_WAYS.intersection(calls(module))):
            yield f"{module.path} calls {name}: serve by {SERVES}, which bounds connections and asks for the token"
        for name in module.imports:
            if any(name == other or name.startswith(f"{other}.") for other in OTHER_MODULES):
                yield f"{module.path} imports {name}: serve by {SERVES}"


def product():
    return [module for module in project() if module.path.startswith(PRODUCT)]


def test_every_server_application_is_attacked_by_security_tests(tmp_path):
    attacked = set()
    for server in SERVERS:
        place = tmp_path / server.replace(" ", "-")
        place.mkdir()
        app = application(server, place)
        endpoints = (getattr(route, "endpoint", None) for route in app.routes)
        attacked |= {f"{getattr(endpoint, '__module__', '').replace('.', '/')}.py" for endpoint in endpoints}
    made = {module.path for module in product() if makes_an_application(module)}
    assert len(made) >= 3, "they were found"
    forgotten = sorted(made - attacked - ATTACKED_ELSEWHERE)
    assert not forgotten, f"tests/security/servers.py makes none of {forgotten}: add it to SERVERS and application"


def test_no_module_starts_a_server_without_the_authorisation_check():
    assert not (unguarded := list(other_ways(product()))), "\n".join(unguarded)
    assert {module.path for module in product()} >= MAY, "no exception outlives its file"


@pytest.mark.parametrize("server", SERVERS)
def test_every_server_application_has_the_authorisation_check(server, tmp_path):
    """`guard` adds the authorisation check; `serve_until` serves an application without a token only on loopback."""
    guarded = application(server, tmp_path)
    assert guarded.state.guarded is True


def test_new_server_that_the_security_tests_do_not_cover_is_detected():
    page = Module("pipelinerl/page.py", "import fastapi\napp = fastapi.FastAPI()\n")
    assert makes_an_application(page) and not makes_an_application(Module("pipelinerl/a.py", "FastAPI = None\n"))
    metrics = Module("pipelinerl/metrics.py", "from prometheus_client import start_http_server\nstart_http_server(9)\n")
    files = Module("launch/files.py", "import http.server\n")
    assert len(list(other_ways([page, metrics, files]))) == 2
