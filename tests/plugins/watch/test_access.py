"""Access to the page: one-time links, cookies, requests from other sites, and security headers."""

import time
from contextlib import ExitStack
from urllib.parse import quote

import httpx
import pytest

from pipelinerl.plugins.watch.access import PageLinks, SharedLink, keep_link, lasting_link
from pipelinerl.plugins.watch.server import ADDRESS_SEATS, create_page
from tests.patience import PATIENCE_S
from tests.plugins.watch.run_files import TOKEN, served_page, written_run
from tests.security.servers import TOKEN as GATE_TOKEN, application
from tests.security.test_authorisation import routes

SHARE = "share-key" * 5
COOKIE = {"cookie": f"pipelinerl={TOKEN}"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with served_page(written_run(tmp_path_factory.mktemp("access") / "run", steps=3), share_key=SHARE) as served:
        yield served


def ask(page, path, method="GET", **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, page.url + path, headers=given, trust_env=False, timeout=PATIENCE_S)


def test_page_link_can_be_used_only_once_and_a_new_link_is_announced(page):
    first = page.keys[-1]
    there = ask(page, f"/?key={first}")
    assert (there.status_code, there.headers["location"]) == (303, "/")
    cookie = there.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie and first not in cookie
    assert ask(page, "/api/run", cookie=cookie.partition(";")[0]).status_code == 200
    again = ask(page, f"/?key={first}")
    assert again.status_code == 401 and "each works once" in again.json()["error"]["message"]
    assert "set-cookie" not in again.headers
    assert page.keys[-1] != first and ask(page, f"/?key={page.keys[-1]}").status_code == 303


def test_page_link_opened_from_another_site_sets_the_login_cookie_and_reloads_the_page(page):
    there = ask(page, f"/?key={page.keys[-1]}", sec_fetch_site="cross-site")
    assert (there.status_code, there.headers["refresh"], there.content) == (200, "0; url=/", b"")
    assert TOKEN in there.headers["set-cookie"]


def test_used_page_link_shows_a_form_that_accepts_a_new_key_or_a_pasted_link(page):
    used = page.keys[-1]
    ask(page, f"/?key={used}")
    for path in (f"/?key={used}", "/"):
        answer = ask(page, path, accept="text/html,*/*")
        assert answer.status_code == 401 and answer.headers["content-type"].startswith("text/html"), path
        assert 'name="key"' in answer.text and "form-action 'self'" in answer.headers["content-security-policy"]
    pasted = quote(f"http://127.0.0.1:4321/?key={page.keys[-1]}", safe="")
    assert ask(page, f"/?key={pasted}").status_code == 303, "a pasted whole link works like its key"


def test_shared_link_gives_any_number_of_browsers_read_only_access(page):
    keys = list(page.keys)
    for _ in range(3):
        there = ask(page, f"/?share={SHARE}")
        assert there.status_code == 303 and TOKEN not in there.headers["set-cookie"]
    cookie = {"cookie": there.headers["set-cookie"].partition(";")[0]}
    response = ask(page, "/api/run", **cookie).json()
    assert response["step"] == 3 and not response["may_steer"]
    for method, path in (("PATCH", "/api/knobs"), ("POST", "/api/stop"), ("POST", "/api/engines/add")):
        answer = httpx.request(method, page.url + path, headers=cookie, json={}, trust_env=False, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only"), path
    assert page.keys == keys, "the one-time link still works"
    both = {"cookie": f"{cookie['cookie']}; {COOKIE['cookie']}"}
    assert ask(page, "/api/stop", "POST", **both).json()["error"]["code"] != "read_only"
    for wrong in ("/?share=", "/?share=x", f"/?key={SHARE}"):
        assert ask(page, wrong).status_code == 401, wrong


def test_visitors_of_one_address_leave_seats_at_the_event_stream_to_others(page):
    visitor = {"cookie": f"pipelinerl_share={SHARE}"}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=page.url, trust_env=False, timeout=PATIENCE_S))

        def listen(headers):
            return stack.enter_context(client.stream("GET", "/api/stream", headers=headers)).status_code

        assert [listen(visitor) for _ in range(ADDRESS_SEATS)] == [200] * ADDRESS_SEATS
        assert listen(visitor) == 503 and listen(COOKIE) == 200


def test_shared_link_is_the_same_after_a_restart(tmp_path):
    first = lasting_link(tmp_path)
    assert first.port == 0 and lasting_link(tmp_path) != first
    assert keep_link(tmp_path, SharedLink(first.key, 4321))
    assert lasting_link(tmp_path) == SharedLink(first.key, 4321)
    assert (tmp_path / "share.json").stat().st_mode & 0o077 == 0
    for damaged in ("", "[]", '{"key": "", "port": 1}', '{"key": null, "port": 1}', '{"key": "' + "x" * 50 + '"}'):
        (tmp_path / "share.json").write_text(damaged)
        assert lasting_link(tmp_path).key not in ("", first.key)


@pytest.mark.parametrize("key", ["", "x", "%00", "%ff", "a&key=b", "a" * 5000])
def test_page_rejects_a_wrong_login_key_and_the_current_key_stays_valid(page, key):
    keys = list(page.keys)
    assert ask(page, f"/?key={key}").status_code == 401
    assert page.keys == keys, "a wrong key does not use up the current one"


@pytest.mark.parametrize(
    "cookie",
    ["", "pipelinerl=", f"pipelinerl={TOKEN}x", f"other={TOKEN}", "pipelinerl=\xff", 'pipelinerl="', "=;=", ";"],
)
def test_page_rejects_a_wrong_cookie_and_finds_its_own_among_those_of_servers_on_other_ports(page, cookie):
    answer = httpx.get(
        page.url + "/api/run", headers=[(b"cookie", cookie.encode("latin-1"))], trust_env=False, timeout=PATIENCE_S
    )
    assert answer.status_code == 401

    others = f'a=b; other="x;{COOKIE["cookie"]}x; pipelinerl=no;{COOKIE["cookie"]} ; c'
    assert ask(page, "/api/run", cookie=others).status_code == 200


@pytest.mark.parametrize("path", ["/api/run", "/?key=x"])
async def test_malicious_cookies_are_parsed_quickly(page, path):
    """The cookies are as long as the server accepts; the standard library would need 11 s to parse the first one."""
    app = create_page([], token=TOKEN, links=PageLinks(lambda _: None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=page.url) as http:
        for cookie in ('a="' + "\\a" * 16_000 + '"', 'a="' + '\\"' * 16_000 + '"', "pipelinerl=" * 2_900, ";" * 32_000):
            began = time.thread_time()
            assert (await http.get(path, headers={"cookie": cookie})).status_code == 401
            assert time.thread_time() - began < 1.0, cookie[:20]


def test_event_stream_of_an_unknown_run_is_rejected_before_it_starts(page):
    for query in ("?run=1", "?run=-1", "?run=x"):
        assert ask(page, f"/api/stream{query}", **COOKIE).status_code in (404, 422), query


async def test_every_page_route_rejects_requests_from_other_sites(tmp_path):
    """Routes are listed from the application. SameSite would not protect from another port, which is the same site."""
    app, checked = application("page", tmp_path), 0
    cookie = {"cookie": f"pipelinerl={GATE_TOKEN}", "content-type": "application/json"}
    foreign = (
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://evil.example"},
        {"origin": "null"}, {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-origin"},
    )  # fmt: skip
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for method, path in routes(app):
            if path == "/health":
                continue
            for headers in foreign:
                answer = await http.request(method, path, headers=cookie | headers, content=b"[]")
                assert answer.status_code in (401, 403), (method, path, headers)
                checked += 1
        form = cookie | {"content-type": "text/plain"}
        assert (await http.patch("/api/knobs", headers=form, content=b"{}")).status_code == 415, "a form is rejected"
    assert checked >= 20 * len(foreign), "at least 20 routes were requested"


def test_every_page_response_has_a_content_security_policy(page):
    for path, cookie in (("/", COOKIE), ("/api/run", COOKIE), ("/nothing", COOKIE), ("/api/run", {}), ("/health", {})):
        headers = ask(page, path, **cookie).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'", path
        assert policy["frame-ancestors"] == "'none'" and "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert headers["cross-origin-resource-policy"] == "same-origin" and headers["cache-control"] == "no-store"


def test_page_serves_only_its_own_static_files(page):
    for path in ("/static/../access.py", "/static/..%2f__init__.py", "/static/%2e%2e", "/static/", "/events.jsonl",
                 "/static/nothing.js", "/static//etc/passwd"):  # fmt: skip
        assert ask(page, path, **COOKIE).status_code == 404, path
