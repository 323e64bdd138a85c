"""The one place where HTTP connections are opened, so that each carries the run's token, goes past every proxy that the
environment names (the token is for the run's peers alone), and ends its calls by a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


def authorization(token: str | None) -> dict[str, str]:
    """The header that carries the run's bearer token; no header without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def session(
    base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0, headers: Mapping[str, str] = _NO_HEADERS
) -> httpx.Client:
    """Blocking calls to `base_url`, whose connections are kept; close it, or use it in a `with` block.

    Args:
        base_url: goes before a path that is asked for; empty where calls give whole URLs.
        token: the run's bearer token.
        timeout_s: longest silence, while connecting and while the peer sends nothing.
        headers: further headers of every call.
    """
    import httpx

    return httpx.Client(**_settings(base_url, token, timeout_s, headers), trust_env=False)


def async_session(
    base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0, headers: Mapping[str, str] = _NO_HEADERS
) -> httpx.AsyncClient:
    """What `session` is, for an event loop."""
    import httpx

    return httpx.AsyncClient(**_settings(base_url, token, timeout_s, headers), trust_env=False)


def _settings(base_url: str, token: str | None, timeout_s: float, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "headers": {**headers, **authorization(token)},
        "timeout": timeout_s,
        "verify": _trusted(),
    }


@cache
def _trusted() -> Any:
    """The certificates that are believed: read once, for that takes 30 ms, as long as thirty calls."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)
