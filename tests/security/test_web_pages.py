"""A server that runs without a token rejects every request of web pages in a browser on the same machine.

A page can send GET requests, and POST requests of forms and text, to any address, but cannot remove the `Origin`
header. A page whose domain resolves to 127.0.0.1 after loading (DNS rebinding) has the same origin as the server, but
its requests name that domain in the `Host` header.
"""

import httpx
import pytest

from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S
from tests.security.servers import OPEN_SERVERS, TOKEN, application

#: For each kind of server, the method and path of a route that changes the server's state.
ACTS = {
    "engine": ("POST", "/v1/chat/completions"),
    "controller": ("POST", "/stop"),
    "parameter server": ("POST", "/versions"),
    "verifier": ("POST", "/verify"),
    "oubliette": ("POST", "/work"),
}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module", params=OPEN_SERVERS)
def open_server(request, tmp_path_factory):
    """Yield the URL and the kind of a server without a token."""
    with in_thread(application(request.param, tmp_path_factory.mktemp("run"), token=None)) as served:
        yield served, request.param


def ask(served, method, path, headers, body=b""):
    return httpx.request(method, served + path, headers=headers, content=body, trust_env=False, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"origin": "https://evil.example"} | JSON, 403, "foreign_origin"),
        ({"origin": "null"} | JSON, 403, "foreign_origin"),
        ({"origin": "http://localhost:3000"} | JSON, 403, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"} | JSON, 403, "foreign_origin"),
        ({"sec-fetch-site": "same-site"} | JSON, 403, "foreign_origin"),
        ({"host": "evil.example"} | JSON, 421, "foreign_host"),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"} | JSON, 421, "foreign_host"),
        ({"host": "localhost.evil.example"} | JSON, 421, "foreign_host"),
        ({"host": "127.0.0.1.evil.example"} | JSON, 421, "foreign_host"),
        ({"host": "[::1"} | JSON, 421, "foreign_host"),
        ({"host": ""} | JSON, 421, "foreign_host"),
        ({"content-type": "text/plain"}, 415, "not_json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "not_json"),
        ({"content-type": "multipart/form-data; boundary=x"}, 415, "not_json"),
        ({"content-type": "text/plain; application/json"}, 415, "not_json"),
        ({}, 415, "not_json"),
    ],
)
def test_web_page_cannot_use_a_route_that_changes_a_servers_state(open_server, headers, status, code):
    served, server = open_server
    answer = ask(served, *ACTS[server], headers, b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}])
def test_web_page_cannot_end_a_run_by_a_request_without_a_body(headers, tmp_path):
    with in_thread(application("controller", tmp_path, token=None)) as served:
        assert ask(served, "POST", "/stop", headers).status_code == 403
        assert ask(served, "DELETE", "/engines?engine=x", headers).status_code == 403


def test_web_page_cannot_read_a_servers_responses_through_dns_rebinding(open_server):
    served, _ = open_server
    for path in ("/health", "/v1/models", "/knobs", "/versions"):
        assert ask(served, "GET", path, {"host": "evil.example"}).status_code == 421
    assert ask(served, "OPTIONS", "/health", {"origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:8000"])
def test_server_without_a_token_serves_requests_of_local_users_and_programs(open_server, host):
    served, server = open_server
    assert ask(served, "GET", "/health", {"host": host}).status_code == 200
    method, path = ACTS[server]
    if server != "controller":
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"} | JSON
        answer = ask(served, method, path, own, b"{}")
        assert answer.status_code in (400, 422), "it was read"


def test_web_pages_of_other_origins_are_rejected_even_with_the_token(tmp_path):
    with in_thread(application("engine", tmp_path)) as served:
        known = {"authorization": f"Bearer {TOKEN}", "host": "engine-1.lab:8001"}
        assert ask(served, "GET", "/v1/models", known).status_code == 200
        assert ask(served, "GET", "/v1/models", known | {"origin": "https://evil.example"}).status_code == 403
