"""Who may look at the page: the server's own token, which a browser gets by a link that works once.

    http://127.0.0.1:4321/?key=…  ──▶  Set-Cookie (HttpOnly, SameSite=Strict)  ──▶  http://127.0.0.1:4321/

The key leaves the address at once, and whoever finds it later in a history or a log has nothing. When a link has been
used the next is announced, for another browser. The cookie is turned into the bearer token that `http_service`'s gate
asks for: there is one place that lets requests in. It counts only where a browser does not say that another site, or
another port of this machine, has made the request.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Final, final
from urllib.parse import parse_qs

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.system.http_service import OPEN_PATH, refusal

#: What a page may do: run and show what this server gives it, ask this server, and nothing else.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_OWN: Final = frozenset({b"none", b"same-origin"})
_ASK_FOR_LINK: Final = (
    "this page is for who has its link: open the newest that `pipelinerl watch` has printed; each works once"
)


def new_token() -> str:
    """One that nobody has."""
    return secrets.token_urlsafe(32)


@final
class PageLinks:
    """Makes the links; `announce` is given each, the first when it is asked for and the next when one was used."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._key = ""

    def offer(self) -> None:
        """Announce a new key; the one before is void."""
        self._key = secrets.token_urlsafe(24)
        self._announce(self._key)

    def redeem(self, key: str) -> bool:
        """Is this the key that was offered last? It never is again."""
        if not self._key or not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            return False
        self.offer()
        return True


def admit(app: FastAPI, links: PageLinks, *, token: str, cookie: str) -> None:
    """Put it in front of the gate, which must be there before."""
    app.add_middleware(_Door, links=links, token=token, cookie=cookie)


@final
class _Door:
    """ASGI middleware: links and cookies become the token, and every answer says what a page may do with it."""

    def __init__(self, app: ASGIApp, links: PageLinks, token: str, cookie: str) -> None:
        self._app = app
        self._links = links
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        answer = self._redeemed(scope) or self._refused(scope)
        if answer is None and self._has_cookie(scope):
            bearer = (b"authorization", b"Bearer " + self._token.encode())
            scope = {**scope, "headers": [*scope["headers"], bearer]}
        await (self._app if answer is None else answer)(scope, receive, sending)

    def _redeemed(self, scope: Scope) -> Response | None:
        """To who brings a link: the cookie, and the way to the page without the key."""
        if scope["path"] != "/" or scope["method"] != "GET" or b"key=" not in scope["query_string"]:
            return None
        try:
            key = parse_qs(scope["query_string"].decode("ascii"), max_num_fields=4).get("key", [""])[0]
        except ValueError:
            key = ""
        if not self._links.redeem(key):
            return None if self._has_cookie(scope) else refusal(401, _ASK_FOR_LINK, code="unauthorized")
        there = Response(status_code=303, headers={"location": "/"})
        if _headers(scope, b"sec-fetch-site") == [b"cross-site"]:
            # A link in another site's page: no Strict cookie goes along with its redirects, but with a reload.
            there = Response(status_code=200, headers={"refresh": "0; url=/"}, media_type="text/plain")
        there.set_cookie(self._cookie, self._token, path="/", httponly=True, samesite="strict")
        return there

    def _refused(self, scope: Scope) -> Response | None:
        """People who come without anything are told what to do, and not how programs do it."""
        comes_bare = not _headers(scope, b"authorization") and not self._has_cookie(scope)
        if scope["path"] == OPEN_PATH or not comes_bare:
            return None
        return refusal(401, _ASK_FOR_LINK, code="unauthorized")

    def _has_cookie(self, scope: Scope) -> bool:
        if _headers(scope, b"authorization") or not set(_headers(scope, b"sec-fetch-site")) <= _OWN:
            return False
        # Not by http.cookies, which unescapes in time that grows with the square of a value: 11 s for one head.
        pairs = (pair.strip().partition(b"=") for header in _headers(scope, b"cookie") for pair in header.split(b";"))
        given = (value for name, _, value in pairs if name == self._cookie.encode())
        return any(hmac.compare_digest(value, self._token.encode()) for value in given)


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for each, value in scope["headers"] if each == name]
