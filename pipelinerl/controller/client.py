"""The controller's HTTP API as calls: `ControllerClient`, which blocks, and `AsyncControllerClient`, for an event loop.

Whoever talks to a controller does it by one of them: the commands and the launcher by the first, engines and actors by
the second.

    with ControllerClient(url, token) as controller:
        controller.change_knobs({"k": 4})

Every call raises:

    AddressError   nobody answers in time, or somebody who is no controller
    TokenRefused   the controller wants another token
    RecipeError    the controller refused, with its own sentence
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

import httpx
import msgspec

from pipelinerl.controller import routes
from pipelinerl.controller.routes import ActorAssignment, Done, EngineNames, EngineTaken, KnobsAnswer, Refusal
from pipelinerl.errors import AddressError, RecipeError, TokenRefused
from pipelinerl.observability.status import FleetStatus, RunStatus
from pipelinerl.system.http_client import async_session, session
from pipelinerl.verifiers.service.wire import VerifierLease

T = TypeVar("T")

#: An operator waits longer for an answer than a role does, which asks again soon.
TIMEOUT_S: Final = 10.0
_ROLE_TIMEOUT_S: Final = 5.0
#: What an operator may ask; a role waits for its controller.
_HINT: Final = "; has the run ended?"


@final
class ControllerClient:
    """Blocking calls to the controller at `url`; `who` asks, for the log of changes. Used from one thread."""

    def __init__(self, url: str, token: str | None, *, who: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """Raises AddressError when `url` is none."""
        self.url = url
        headers = {routes.WHO: who} if who else {}
        try:
            self._http = session(url, token=token, timeout_s=timeout_s, headers=headers)
        except httpx.InvalidURL as error:
            raise _silent(url, error, _HINT) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def status(self) -> RunStatus:
        """Return what the run is doing."""
        return self._call("GET", routes.STATUS, RunStatus)

    def knobs(self) -> KnobsAnswer:
        """Return the knobs and the log of their changes."""
        return self._call("GET", routes.KNOBS, KnobsAnswer)

    def change_knobs(self, changes: dict[str, Any]) -> KnobsAnswer:
        """Change knobs, all of them or none; they take effect at the next step boundary."""
        try:
            body = json.dumps(changes, allow_nan=False)  # escapes half a surrogate pair, which the controller refuses
        except ValueError:
            raise RecipeError("knobs must be finite numbers, or the text inf for no bound on k") from None
        headers = {"content-type": "application/json"}
        return self._call("PATCH", routes.KNOBS, KnobsAnswer, content=body, headers=headers)

    def stop(self) -> None:
        """End the run at its next step boundary."""
        self._call("POST", routes.STOP, Done)

    def suspend(self) -> None:
        """End the run with its state saved as soon as the step under way is taken, to go on another time."""
        self._call("POST", routes.SUSPEND, Done)

    def engines(self) -> FleetStatus:
        """Return the engines, those that are to come and those that are to go."""
        return self._call("GET", routes.ENGINES, FleetStatus)

    def register_engine(self, url: str) -> None:
        """Take a running engine into the fleet."""
        self._call("POST", routes.ENGINES, Done, json={"url": url})

    def request_engines(
        self, type: str, *, count: int = 1, replaces: str = "", grace_s: float = routes.GRACE_S
    ) -> tuple[str, ...]:
        """Have the launcher start engines and return their names; see `routes.EngineStart`."""
        start = {"type": type, "count": count, "replaces": replaces, "grace_s": grace_s}
        return self._call("POST", routes.ENGINES_REQUEST, EngineNames, json=start).names

    def drain_engine(self, engine: str, *, grace_s: float = routes.GRACE_S) -> None:
        """Let an engine (URL or name) end what it has, at most `grace_s` seconds long, and take it out."""
        self._call("POST", routes.ENGINES_DRAIN, Done, json={"engine": engine, "grace_s": grace_s})

    def remove_engine(self, engine: str) -> None:
        """Take an engine (URL or name) out at once."""
        self._call("DELETE", routes.ENGINES, Done, params={"engine": engine})

    def _call(self, method: str, path: str, answer: type[T], **content: Any) -> T:
        try:
            response = self._http.request(method, path, **content)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # a label of 70 letters is no InvalidURL
            raise _silent(self.url, error, _HINT) from None
        return _decoded(self.url, response, answer, _HINT)


@final
class AsyncControllerClient:
    """What engines and actors ask of the controller at `url`; used from one event loop, and closed in it."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._http = async_session(url, token=token, timeout_s=_ROLE_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def assignment(self) -> ActorAssignment:
        """Return what an actor works by."""
        return await self._call("GET", routes.ASSIGNMENT, ActorAssignment)

    async def register_engine(self, url: str, *, incarnation: str, name: str, type: str) -> float:
        """Offer an engine, and return after how many seconds to do so again; the controller takes a repetition for
        nothing new. See `routes.EngineOffer`."""
        offer = {"url": url, "incarnation": incarnation, "name": name, "type": type}
        return (await self._call("POST", routes.ENGINES, EngineTaken, json=offer)).again_s

    async def offer_verifier(self, lease: VerifierLease) -> None:
        """Say that a verifier service is there; it is said again and again. See `routes.VerifierOffer`."""
        await self._call("POST", routes.VERIFIERS, Done, json=msgspec.to_builtins(lease))

    async def withdraw_verifier(self, url: str) -> None:
        """Have nothing new sent to a verifier service."""
        await self._call("DELETE", routes.VERIFIERS, Done, params={"url": url})

    async def _call(self, method: str, path: str, answer: type[T], **content: Any) -> T:
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _silent(self.url, error) from None
        return _decoded(self.url, response, answer)


def _silent(url: str, error: Exception, hint: str = "") -> AddressError:
    reason = str(error) or type(error).__name__  # a connection that times out has no words
    return AddressError(f"the controller at {url} does not answer ({reason}){hint}")


def _decoded(url: str, response: httpx.Response, answer: type[T], hint: str = "") -> T:
    try:
        if not response.is_error:
            return msgspec.json.decode(response.content, type=answer)
        sentence = msgspec.json.decode(response.content, type=Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets two through as they are
        reason = f"{response.status_code} {response.reason_phrase}: {error}"
        raise AddressError(f"what answers at {url} is no controller ({reason}){hint}") from None
    refused = TokenRefused if response.status_code == httpx.codes.UNAUTHORIZED else RecipeError
    raise refused(sentence)
