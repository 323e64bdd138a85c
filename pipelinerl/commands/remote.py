"""`Remote`: a live run's controller, found through the run's directory or by its URL; what the CLI talks to."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, final
from urllib.parse import quote

import httpx
import msgspec

from pipelinerl.controller.state.knobs import KnobChange
from pipelinerl.errors import AddressError, RecipeError, UserError
from pipelinerl.observability.status import RunStatus
from pipelinerl.roles.process import read_token

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Remote:
    """Address and token of a controller."""

    url: str
    token: str | None

    @classmethod
    def of(cls, run: Path | str) -> Self:
        """The controller of the run in a directory, or at a URL; then with the token of $PIPELINERL_TOKEN.

        Raises:
            UserError: no run is live in the directory.
        """
        if is_url(run):
            return cls(str(run).rstrip("/"), read_token(None))
        endpoint = Path(run) / "controller.json"
        try:
            return msgspec.json.decode(endpoint.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            raise UserError(f"{run} has no live run: {endpoint} cannot be read; is the controller running?") from None

    def status(self) -> RunStatus:
        """What the run is doing; raises as `call` does."""
        return self.call("GET", "/status", RunStatus)

    def knobs(self) -> KnobsAnswer:
        """The knobs and the log of their changes; raises as `call` does."""
        return self.call("GET", "/knobs", KnobsAnswer)

    def change(self, changes: dict[str, Any]) -> KnobsAnswer:
        """Change knobs; raises as `call` does."""
        return self.call("PATCH", "/knobs", KnobsAnswer, changes)

    def stop(self) -> None:
        """End the run at its next step boundary; raises as `call` does."""
        self.call("POST", "/stop", dict[str, str])

    def add(self, url: str) -> None:
        """Take a running engine into the fleet; raises as `call` does."""
        self.call("POST", "/engines", dict[str, str], {"url": url})

    def request_engines(self, type: str, *, count: int = 1, replaces: str = "", grace_s: float = 60.0) -> list[str]:
        """Have engines started; their names. Raises as `call` does."""
        order = {"type": type, "count": count, "replaces": replaces, "grace_s": grace_s}
        return self.call("POST", "/engines/request", _RequestedNames, order).names

    def drain(self, engine: str, *, grace_s: float) -> None:
        """Let an engine (URL or name) end what it has, and take it out; raises as `call` does."""
        self.call("POST", "/engines/drain", dict[str, str], {"engine": engine, "grace_s": grace_s})

    def remove(self, engine: str) -> None:
        """Take an engine (URL or name) out at once; raises as `call` does."""
        self.call("DELETE", f"/engines?engine={quote(engine, safe='')}", dict[str, str])

    def call(self, method: str, path: str, answer: type[T], body: dict[str, Any] | None = None) -> T:
        """What the controller answers, as the type `answer`.

        Raises:
            AddressError: nobody answers, or somebody who is no controller.
            RecipeError: the controller refused, with its sentence.
        """
        headers = {"x-who": _user()} | ({"authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            given = httpx.request(method, self.url + path, json=body, headers=headers, timeout=10.0, trust_env=False)
            if given.is_error:
                raise RecipeError(msgspec.json.decode(given.content, type=_Refused).error.message)
            return msgspec.json.decode(given.content, type=answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AddressError(f"the controller at {self.url} does not answer ({error}); has the run ended?") from None
        except msgspec.DecodeError:
            raise AddressError(f"what answers at {self.url} is no controller; has the run ended?") from None


def is_url(run: Path | str) -> bool:
    """Is a run named by its controller's URL, and not by its directory?"""
    return str(run).startswith(("http://", "https://"))


class KnobsAnswer(msgspec.Struct, frozen=True):
    """Values by name, the log of changes, and when a change takes effect."""

    knobs: dict[str, Any]
    log: list[KnobChange] = []
    effective: str = ""


class _RequestedNames(msgspec.Struct, frozen=True):
    names: list[str]


class _Sentence(msgspec.Struct, frozen=True):
    message: str


class _Refused(msgspec.Struct, frozen=True):
    error: _Sentence


def _user() -> str:
    """Who asks, for the log of changes; a container may run as somebody without a name."""
    try:
        return getpass.getuser().encode("ascii", "replace").decode()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
