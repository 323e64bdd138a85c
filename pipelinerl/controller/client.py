"""Clients of the controller's HTTP API: `ControllerClient` (blocking) and `AsyncControllerClient` (for an event loop).

Commands and the launcher use the blocking client, engines and actors the asynchronous one.

    with ControllerClient(url, token) as controller:
        controller.change_knobs({"k": 4})

Calls raise AddressError if no controller answers in time, TokenRefused if the controller requires a different token,
and RecipeError with the controller's message if the controller rejects the request.
"""

from __future__ import annotations

import json
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from pipelinerl.controller import routes
from pipelinerl.controller.routes import (
    ActorAssignment,
    Done,
    EngineNames,
    EngineTaken,
    KnobsAnswer,
    Refusal,
    VerifierLease,
)
from pipelinerl.errors import AddressError, RecipeError, TokenRefused, reason_of
from pipelinerl.observability.status import FleetStatus, RunStatus
from pipelinerl.system.http_client import async_session, session

T = TypeVar("T")

#: Timeout in seconds for requests of commands. Engines and actors use a shorter timeout, since they retry.
TIMEOUT_S: Final = 10.0
_ROLE_TIMEOUT_S: Final = 5.0
#: Hint in the error messages of commands. Engines and actors get no hint, since they wait for the controller.
_HINT: Final = "; has the run ended?"


class ControllerClient:
    """Blocking client of the controller at `url`; `who` names the caller in the knob log. Use from one thread."""

    def __init__(self, url: str, token: str | None, *, who: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """Create a client without connecting. Raises AddressError if `url` is invalid."""
        self.url = url
        headers = {routes.WHO: who} if who else {}
        try:
            self._http = session(url, token=token, timeout_s=timeout_s, headers=headers)
        except httpx.InvalidURL as error:
            raise _silent(url, error, _HINT) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def status(self) -> RunStatus:
        """Return the status of the run."""
        return self._call("GET", routes.STATUS, RunStatus)

    def knobs(self) -> KnobsAnswer:
        """Return the current values of the knobs and the log of their changes."""
        return self._call("GET", routes.KNOBS, KnobsAnswer)

    def change_knobs(self, changes: dict[str, Any]) -> KnobsAnswer:
        """Change all knobs in `changes` at the next step boundary, or none of them if one is invalid."""
        try:
            # Encode with `json`, which escapes lone surrogates, so that the controller can reject them.
            body = json.dumps(changes, allow_nan=False)
        except ValueError:
            raise RecipeError("knobs must be finite numbers, or the text inf for no bound on k") from None
        headers = {"content-type": "application/json"}
        return self._call("PATCH", routes.KNOBS, KnobsAnswer, content=body, headers=headers)

    def stop(self) -> None:
        """Request that the run ends at its next step boundary."""
        self._call("POST", routes.STOP, Done)

    def suspend(self) -> None:
        """Request that the run saves its state after the current step and ends, so that it can be resumed later."""
        self._call("POST", routes.SUSPEND, Done)

    def engines(self) -> FleetStatus:
        """Return all engines, including those that are requested but have not joined, and those that are leaving."""
        return self._call("GET", routes.ENGINES, FleetStatus)

    def register_engine(self, url: str) -> None:
        """Add a running engine to the fleet."""
        self._call("POST", routes.ENGINES, Done, json={"url": url})

    def request_engines(
        self, type: str, *, count: int = 1, replaces: str = "", grace_s: float = routes.GRACE_S
    ) -> tuple[str, ...]:
        """Have the launcher start engines, and return the names of these engines; see `routes.EngineStart`."""
        start = {"type": type, "count": count, "replaces": replaces, "grace_s": grace_s}
        return self._call("POST", routes.ENGINES_REQUEST, EngineNames, json=start).names

    def drain_engine(self, engine: str, *, grace_s: float = routes.GRACE_S) -> None:
        """Remove an engine (URL or name) once its current work is finished, or after `grace_s` seconds."""
        self._call("POST", routes.ENGINES_DRAIN, Done, json={"engine": engine, "grace_s": grace_s})

    def remove_engine(self, engine: str) -> None:
        """Remove an engine (URL or name) immediately, without waiting for its current work."""
        self._call("DELETE", routes.ENGINES, Done, params={"engine": engine})

    def _call(self, method: str, path: str, answer: type[T], **content: Any) -> T:
        try:
            response = self._http.request(method, path, **content)
        # The URL's host name raises UnicodeError if one of its labels is too long.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise _silent(self.url, error, _HINT) from None
        return _decoded(self.url, response, answer, _HINT)


class AsyncControllerClient:
    """Async client of the controller at `url` for engines and actors; use and close it in one event loop."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._http = async_session(url, token=token, timeout_s=_ROLE_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def assignment(self) -> ActorAssignment:
        """Return the current settings for actors."""
        return await self._call("GET", routes.ASSIGNMENT, ActorAssignment)

    async def register_engine(self, url: str, *, incarnation: str, name: str, type: str) -> EngineTaken:
        """Offer the engine to the controller, as engines do repeatedly while they live; return its answer."""
        offer = {"url": url, "incarnation": incarnation, "name": name, "type": type}
        return await self._call("POST", routes.ENGINES, EngineTaken, json=offer)

    async def offer_verifier(self, lease: VerifierLease) -> None:
        """Register a verifier service for `LEASE_S`; repeat the call to keep it. See `routes.VerifierOffer`."""
        await self._call("POST", routes.VERIFIERS, Done, json=msgspec.to_builtins(lease))

    async def withdraw_verifier(self, url: str) -> None:
        """Ask the controller to send no more new work to the verifier service at `url`."""
        await self._call("DELETE", routes.VERIFIERS, Done, params={"url": url})

    async def _call(self, method: str, path: str, answer: type[T], **content: Any) -> T:
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _silent(self.url, error) from None
        return _decoded(self.url, response, answer)


def _silent(url: str, error: Exception, hint: str = "") -> AddressError:
    return AddressError(f"the controller at {url} does not answer ({reason_of(error)}){hint}")


def _decoded(url: str, response: httpx.Response, answer: type[T], hint: str = "") -> T:
    try:
        if not response.is_error:
            return msgspec.json.decode(response.content, type=answer)
        sentence = msgspec.json.decode(response.content, type=Refusal).error.message
    # msgspec does not turn UnicodeDecodeError and RecursionError into a DecodeError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"{response.status_code} {response.reason_phrase}: {error}"
        raise AddressError(f"the server at {url} is not a controller ({reason}){hint}") from None
    refused = TokenRefused if response.status_code == httpx.codes.UNAUTHORIZED else RecipeError
    raise refused(sentence)
