"""`Steering`: the page's connection to the controller of a live run. Without a controller, the page only shows the run.

Changes use the controller's API with the run's token and the operator's name, like `pipelinerl knobs` and `engines`.
Before a change is sent, the controller's own rules are applied here, so that the page shows a refusal immediately.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipelinerl.commands.remote import controller_of
from pipelinerl.config import recipe as recipes
from pipelinerl.controller.client import ControllerClient
from pipelinerl.controller.routes import KnobsAnswer
from pipelinerl.controller.state.knobs import LARGEST, Knobs
from pipelinerl.enums import COLDEST, HOTTEST
from pipelinerl.errors import AddressError, RecipeError, TokenRefused, UserError
from pipelinerl.observability.status import RunStatus
from pipelinerl.plugins.watch.page.run_view import RunView
from pipelinerl.roles.wiring import knobs_of

_TIMEOUT_S: Final = 5.0
#: Seconds without an event after which the controller is assumed dead; a live controller writes events more often.
_SILENT_S: Final = 15.0
#: Minimum seconds between two status requests to the controller; requests of pages in between get the cached status.
_STATUS_S: Final = 1.0
_READ_ONLY: Final = "`pipelinerl watch` was started with --read-only, so its links cannot change the run"
_SHARED: Final = "this is a shared link, which is read-only"

#: Description, slider range and limits of each knob, by name.
_KNOBS: Final[dict[str, dict[str, Any]]] = {
    "j": {
        "what": "versions by which an engine may fall behind; auto: the run chooses", "least": 1, "slider": [1, 16],
        "unit": "versions",
    },
    "k": {
        "what": "maximum age of a rollout at its step", "least": 1, "slider": [1, 16],
        "unit": "versions", "may_be_infinite": True, "whole": True,
    },
    "temperature": {"what": "sampling temperature", "least": COLDEST, "most": HOTTEST, "slider": [0.1, 2.0]},
    "learning_rate": {"what": "learning rate before its schedule", "least": 0, "log": True},
    "rollouts_per_step": {"what": "answers per step", "least": 1},
    "evaluation_interval_steps": {"what": "steps between evaluations", "least": 1},
    "groups_in_flight": {"what": "groups per actor at a time", "least": 1},
}  # fmt: skip
_WHOLE: Final = frozenset({"j", "rollouts_per_step", "evaluation_interval_steps", "groups_in_flight"})


class CannotSteer(UserError):
    """A change of the run is impossible: no controller answers, or this page may not change the run."""


@dataclass(slots=True)
class Steering:
    """Connection to the controller of the run in a directory, for use from any thread; close it after use."""

    run_dir: Path
    read_only: bool = False
    _status: RunStatus | None = None
    _requested_at: float = -math.inf
    _client: ControllerClient | None = None
    """Client of the controller, kept open while the controller answers; only the thread that holds `_lock` uses it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def status(self, *, max_age_s: float = _STATUS_S) -> RunStatus | None:
        """Return the controller's status, at most `max_age_s` seconds old; None if the controller does not answer."""
        with self._lock:
            if time.monotonic() - self._requested_at >= max_age_s:
                try:
                    if self._client is None:
                        self._client = controller_of(self.run_dir, timeout_s=_TIMEOUT_S)
                    self._status = self._client.status()
                except UserError:
                    self._status = None
                    self._hang_up()  # reconnect next time, because the controller may restart at another address
                self._requested_at = time.monotonic()
            return self._status

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def obstacle(self, *, looks_only: bool = False) -> str:
        """Return why this client may not change the run; empty if it may. `looks_only` means a read-only client."""
        if self.read_only or looks_only:
            return _SHARED if looks_only else _READ_ONLY
        return "" if self.status() is not None else "no controller answers: the run is not live, or is just starting"

    def knobs(self) -> KnobsAnswer:
        with controller_of(self.run_dir, timeout_s=_TIMEOUT_S) as controller:
            return controller.knobs()

    @contextmanager
    def changing(self) -> Iterator[ControllerClient]:
        """Yield a client of the controller for a change of the run; raise `CannotSteer` if the page is read-only."""
        if self.read_only:
            raise CannotSteer(_READ_ONLY)
        try:
            with controller_of(self.run_dir, timeout_s=_TIMEOUT_S) as controller:
                yield controller
        finally:
            with self._lock:
                self._requested_at = -math.inf  # the change has made the cached status outdated

    def refused(self, changes: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the errors, by knob, with which the controller would refuse changes; "" names their combination."""
        now = self._recipe_knobs().patched(self.knobs().knobs)
        try:
            now.patched(changes)
        except RecipeError as error:
            messages = []
            for name, value in changes.items():
                try:
                    now.patched({name: value})
                except RecipeError as alone:
                    messages.append({"knob": name, "message": str(alone)})
            return messages or [{"knob": "", "message": str(error)}]
        return []

    def steps_of(self, name: str) -> dict[str, Any]:
        """Return `{"step": increment}` for a knob's slider if the increment depends on the recipe, otherwise `{}`."""
        if name != "rollouts_per_step":
            return {}
        try:
            sizes = set(self._recipe_knobs().group_sizes.values())
        except CannotSteer:
            return {}
        return {"step": sizes.pop()} if len(sizes) == 1 else {}

    def _recipe_knobs(self) -> Knobs:
        try:
            return knobs_of(recipes.load(str(self.run_dir / "recipe.toml")))
        except UserError as error:
            raise CannotSteer(f"the run's recipe cannot be read, so changes cannot be checked: {error}") from None


def described(name: str, value: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a knob's value with its description and limits, for the page; entries of `more` take precedence."""
    description: dict[str, Any] = {
        "name": name, "value": value, "kind": "number", "least": None, "most": LARGEST, "whole": name in _WHOLE,
        "log": False, "may_be_infinite": False, "step": 1 if name in _WHOLE or name == "k" else None, "unit": "",
        "what": "",
    }  # fmt: skip
    if name.startswith("domain_weights."):
        description |= {"least": 0, "slider": [0, 4], "what": "weight of this domain; 0 disables it"}
    description |= {**_KNOBS.get(name, {}), **more}
    if "slider" not in description:
        known = float(value) if isinstance(value, int | float) and value > 0 else 1.0
        description["slider"] = (
            [known / 100, known * 10] if description["log"] else [description["step"] or 0, 4 * known]
        )
    return description


def sort_of(error: UserError) -> tuple[int, str]:
    """Return the HTTP status and the error code with which the page's server answers a change that failed."""
    if isinstance(error, TokenRefused):
        return 502, "controller_refused_token"
    if isinstance(error, RecipeError):
        return 422, "refused"
    if isinstance(error, AddressError):
        return 502, "controller_silent"
    return (403, "read_only") if str(error) == _READ_ONLY else (409, "no_controller")


def flat(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return knob values by name; each domain's weight becomes a knob of its own."""
    values = dict(knobs)
    weights = values.pop("domain_weights", {})
    return values | {f"domain_weights.{name}": weight for name, weight in weights.items()}


def state_without_controller(view: RunView) -> str:
    """Return the state of a run whose controller does not answer: how it ended, or else `starting` or `crashed`."""
    newest = view.newest.get("time")
    recent = isinstance(newest, int | float) and time.time() - newest < _SILENT_S
    return view.state or ("starting" if recent or not view.newest else "crashed")
