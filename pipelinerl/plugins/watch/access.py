"""Access to the web page of `pipelinerl watch`: who may view it, and who may change the run.

    http://127.0.0.1:4321/?key=…    works once     ──▶ a cookie with the server's token  ──▶  /   views and changes
    http://127.0.0.1:4321/?share=…  works always   ──▶ a cookie with the link's key      ──▶  /   views only

The server redirects an opened link to an address without the key. A one-time key that remains in the browser's history
or in a log is already used up. When a one-time link is used, the server prints the next one, for another browser.

Cookies are HttpOnly and SameSite=Strict; a cookie is ignored if the browser reports that another site, or another port
of this machine, made the request. A valid cookie is replaced by the bearer token, so that `http_service` alone decides
which requests are admitted. Browsers without a cookie get a page that asks for a key; programs get a JSON error.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.plugins.watch import page
from pipelinerl.system.files import write_private
from pipelinerl.system.http_service import OPEN_PATH, refusal

#: Content security policy: the page may load and run only files of this server, and may call only this server.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_OWN_SITE: Final = frozenset({b"none", b"same-origin"})
_READS_ONLY: Final = frozenset({"GET", "HEAD"})
_ASK_FOR_LINK: Final = "a key is required: open the newest link that `pipelinerl watch` has printed; each works once"
_SHARED: Final = "this link is read-only: to make changes, open one that `pipelinerl watch` prints without --share"
#: The page that asks for a key. Its style is inline because files are served only to requests with a key.
_KEY_PAGE: Final = (Path(page.__file__).parent / "static" / "key.html").read_text()
_SHARE_FILE: Final = "share.json"


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A permanent link to the page: its key, and the port in its address; 0 if unknown."""

    key: str
    port: int = 0


def lasting_link(run_dir: Path) -> SharedLink:
    """Return the permanent link that is stored in the run's directory, or else a new link."""
    try:
        kept = json.loads((run_dir / _SHARE_FILE).read_text())
        key, port = kept["key"], kept["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return SharedLink(new_token())
    fits = isinstance(key, str) and len(key) >= 40 and key.isascii() and isinstance(port, int) and 0 < port < 65536
    return SharedLink(key, port) if fits else SharedLink(new_token())


def keep_link(run_dir: Path, share: SharedLink) -> bool:
    """Store the permanent link for the next `pipelinerl watch --share`; return False if that is not possible."""
    try:
        write_private(run_dir / _SHARE_FILE, json.dumps({"key": share.key, "port": share.port}))
    except OSError:
        return False
    return True


class PageLinks:
    """One-time links to the page. Each new key is passed to `announce`; using a key creates the next one."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._key = ""

    def offer(self) -> None:
        """Announce a new key, which invalidates the previous one."""
        self._key = secrets.token_urlsafe(24)
        self._announce(self._key)

    def redeem(self, key: str) -> bool:
        """Return True if this is the current key; then invalidate it and announce the next."""
        if not self._key or not _same(key.encode(errors="replace"), self._key):
            return False
        self.offer()
        return True


class AccessMiddleware:
    """ASGI middleware for links, cookies and the security policy; `share_key` is the permanent link's key, or empty."""

    def __init__(self, app: ASGIApp, links: PageLinks, token: str, cookie: str, share_key: str) -> None:
        self._app = app
        self._links = links
        self._token = token
        self._share_key = share_key
        self._cookie = cookie
        self._share_cookie = f"{cookie}_share"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                own_policy = any(name == b"content-security-policy" for name, _ in headers)
                policy = () if own_policy else ((b"content-security-policy", POLICY.encode()),)
                message["headers"] = [*headers, *_HEADERS, *policy]
            await send(message)

        steers = self._has_cookie(scope, self._cookie, self._token)
        looks = not steers and self._has_cookie(scope, self._share_cookie, self._share_key)
        answer = self._opened(scope, is_known=steers or looks)
        if answer is None and (steers or looks):
            bearer = (b"authorization", b"Bearer " + self._token.encode())
            state = {**scope.get("state", {}), "looks_only": looks}
            scope = {**scope, "headers": [*scope["headers"], bearer], "state": state}
            if looks and scope["method"] not in _READS_ONLY:
                answer = refusal(403, _SHARED, code="read_only")
        elif answer is None and scope["path"] != OPEN_PATH and not _headers(scope, b"authorization"):
            answer = _ask_for_key(scope)  # `http_service` checks a bearer token
        await (self._app if answer is None else answer)(scope, receive, sending)

    def _opened(self, scope: Scope, *, is_known: bool) -> Response | None:
        """Answer a request that opens a link: set its cookie and redirect. A wrong link gets the page for keys."""
        if scope["path"] != "/" or scope["method"] != "GET":
            return None
        name, key = _link_in(scope["query_string"])
        if name == "share" and self._share_key and _same(key.encode(errors="replace"), self._share_key):
            return _welcome(scope, self._share_cookie, self._share_key)
        if name == "key" and self._links.redeem(key):
            return _welcome(scope, self._cookie, self._token)
        return None if not name or is_known else _ask_for_key(scope)

    def _has_cookie(self, scope: Scope, name: str, expected: str) -> bool:
        if not expected or _headers(scope, b"authorization"):
            return False
        if not set(_headers(scope, b"sec-fetch-site")) <= _OWN_SITE:
            return False
        # http.cookies is not used: its unescaping takes quadratic time, 11 s for one malicious header.
        pairs = (pair.strip().partition(b"=") for header in _headers(scope, b"cookie") for pair in header.split(b";"))
        return any(_same(value, expected) for each, _, value in pairs if each == name.encode())


def _link_in(query: bytes) -> tuple[str, str]:
    """Return (`key` or `share`, value) of the query, or of a whole link pasted as a key; ("", "") if there is none."""
    try:
        fields = parse_qs(query.decode("ascii"), max_num_fields=4, keep_blank_values=True)
    except ValueError:
        return ("key", "") if b"key=" in query or b"share=" in query else ("", "")
    for name in ("share", "key"):
        if name in fields:
            value = fields[name][0].strip()
            pasted = re.search(r"[?&](key|share)=([^&#\s]*)$", value)
            return (pasted[1], pasted[2]) if pasted else (name, value)
    return "", ""


def _welcome(scope: Scope, cookie: str, value: str) -> Response:
    there = Response(status_code=303, headers={"location": "/"})
    if _headers(scope, b"sec-fetch-site") == [b"cross-site"]:
        # The user clicked the link on another site. When browsers follow a redirect from there, they send no cookie
        # with SameSite=Strict. They do send it after a reload, so answer with a page that reloads itself.
        there = Response(status_code=200, headers={"refresh": "0; url=/"}, media_type="text/plain")
    there.set_cookie(cookie, value, path="/", httponly=True, samesite="strict")
    return there


def _ask_for_key(scope: Scope) -> Response:
    accepted = b",".join(_headers(scope, b"accept"))
    if scope["path"] != "/" or b"text/html" not in accepted:
        return refusal(401, _ASK_FOR_LINK, code="unauthorized")
    style = re.search("<style>(.*?)</style>", _KEY_PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256((style[1] if style else "").encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    return Response(_KEY_PAGE, 401, headers={"content-security-policy": policy}, media_type="text/html")


def _same(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode())


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for each, value in scope["headers"] if each == name]
