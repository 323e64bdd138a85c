"""`Remote`: a live run's controller, found through its directory; what the CLI talks to."""

from __future__ import annotations

import getpass
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import httpx

from pipelinerl.errors import AddressError, RecipeError, UserError


@final
@dataclass(frozen=True, slots=True)
class Remote:
    """Address and token of a controller."""

    url: str
    token: str | None

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """The controller of the run in `run_dir`, or the one at that address if it is a URL.

        Raises:
            UserError: no run is live there.
        """
        endpoint = run_dir / "controller.json"
        try:
            record = json.loads(endpoint.read_text())
        except (OSError, ValueError):
            raise UserError(
                f"{run_dir} has no live run: {endpoint} cannot be read; is the controller running?"
            ) from None
        return cls(record["url"], record["token"])

    def get(self, path: str) -> httpx.Response:
        """GET; see `_call`."""
        return self._call("GET", path)

    def post(self, path: str) -> httpx.Response:
        """POST without a body; see `_call`."""
        return self._call("POST", path)

    def patch(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """PATCH with a JSON body; see `_call`."""
        return self._call("PATCH", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The answer.

        Raises:
            AddressError: nobody answers.
            RecipeError: the controller refused, with its sentence.
        """
        headers = {"x-who": getpass.getuser()} | ({"authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=10.0)
        except httpx.HTTPError as error:
            raise AddressError(f"the controller at {self.url} does not answer ({error}); has the run ended?") from None
        if answer.is_error:
            raise RecipeError(_sentence(answer))
        return answer


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the controller answered {answer.status_code}"
