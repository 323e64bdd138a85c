"""Runs by directory or URL: the controller and engines of a live run, and the events of any."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from pipelinerl.config.recipe import check_layout, load_run
from pipelinerl.controller.client import TIMEOUT_S, ControllerClient
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event, read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.status import EngineStatus
from pipelinerl.roles.process import TOKEN_VARIABLE, read_token

#: Seconds to wait for an answer when checking that a controller is alive.
_ANSWERS_S = 2.0


class ControllerAddress(msgspec.Struct, frozen=True):
    """Contents of `controller.json`, which a controller writes into its run's directory."""

    url: str
    token: str | None


def controller_of(run: Path | str, *, timeout_s: float = TIMEOUT_S) -> ControllerClient:
    """Return a client of a controller. `run` is a run's directory, or a URL whose token is in $PIPELINERL_TOKEN.

    Raises:
        UserError: no run is live in the directory, or another version of the project started it.
    """
    address = address_of(run)
    return ControllerClient(address.url, address.token, who=_user(), timeout_s=timeout_s)


def started_by_hand(run_dir: Path) -> str:
    """Describe the controller of a live run that has no launcher; empty if no such run is live."""
    if not (run_dir / "controller.json").is_file():
        return ""
    try:
        with controller_of(run_dir, timeout_s=_ANSWERS_S) as controller:
            controller.status()
            return f"services started manually, controller at {controller.url}"
    except UserError:
        return ""


def address_of(run: Path | str) -> ControllerAddress:
    """Return the controller's address and token; raises like `controller_of`."""
    if is_url(run):
        return ControllerAddress(str(run).rstrip("/"), read_token(None))
    check_layout(Path(run))
    endpoint = Path(run) / "controller.json"
    try:
        return msgspec.json.decode(endpoint.read_bytes(), type=ControllerAddress)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{run} has no live run: {_why_none(Path(run))}") from None


def _why_none(run_dir: Path) -> str:
    if not run_dir.is_dir():
        return "there is no such directory"
    if not (run_dir / "recipe.toml").is_file() and (run_dir / "tokens.json").is_file():
        return "its controller has not started yet; start it with pipelinerl controller"
    if not (run_dir / "recipe.toml").is_file():
        return "it is not a run's directory: recipe.toml is missing"
    try:
        last = tell(read_events(run_dir / "events.jsonl")).finished
    except OSError:
        last = None
    if last is None:
        return f"it is starting or has crashed; pipelinerl run --resume {run_dir} continues it"
    if last["kind"] == "run_finished":
        return f"it has finished ({last.get('reason', 'finished')}); pipelinerl samples, report and watch show it"
    return f"it has ended ({last.get('reason', last['kind'])}); pipelinerl run --resume {run_dir} continues it"


def is_url(run: Path | str) -> bool:
    """Return True if `run` is a controller's URL rather than a directory."""
    return str(run).startswith(("http://", "https://"))


def _user() -> str:
    # In a container, the user id may have no user name.
    try:
        return getpass.getuser().encode("ascii", "replace").decode()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


_SNIPPET: Final = """\
{imports}
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(
    model={model},
    messages=[{{"role": "user", "content": "Hello"}}],
    max_tokens=64,
)
print(answer.choices[0].message.content)"""


def access_line(run: str, engines: Sequence[EngineStatus]) -> str:
    """Return a line with the engines' URL, the model and the API key for clients; no URL if no engine serves."""
    serving = [engine.url for engine in engines if engine.serves]
    more = f" and {len(serving) - 1} more" if len(serving) > 1 else ""
    where = [f"OpenAI API at {serving[0]}/v1{more}"] if serving else []
    model = [f"model {name}"] if (name := _model_of(run)) is not None else []
    key = f"key in ${TOKEN_VARIABLE}" if is_url(run) else f'key is "token" in {_tokens_of(run)}'
    return ", ".join([*where, *model, key])


def client_snippet(run: str, engines: Sequence[EngineStatus]) -> str:
    """Return a Python program that sends a request to the first serving engine; raise `UserError` if none serves."""
    serving = next((engine for engine in engines if engine.serves), None)
    if serving is None:
        raise UserError(f"{run} has no engine that serves; pipelinerl engines list {run} shows what they wait for")
    name = _model_of(run)
    model = "client.models.list().data[0].id" if name is None else f'"{name}"'
    if is_url(run):
        key = f'os.environ["{TOKEN_VARIABLE}"]'
        return _SNIPPET.format(imports="import os\n", url=serving.url, key=key, model=model)
    imports = "import json\nfrom pathlib import Path\n"
    key = f'json.loads(Path("{_tokens_of(run)}").read_text())["token"]'
    return _SNIPPET.format(imports=imports, url=serving.url, key=key, model=model)


def _tokens_of(run: str) -> Path:
    return Path(run).resolve() / "tokens.json"


def _model_of(run: str) -> str | None:
    """Return the model name that the run's engines accept, or None if the recipe is not on this machine."""
    if is_url(run) or not (Path(run) / "recipe.toml").is_file():
        return None
    return load_run(Path(run)).model.path.removeprefix("shipped:").rstrip("/").rpartition("/")[2]


def recorded_events(run_dir: Path) -> list[Event]:
    """Return all events of a run; raise `UserError` if there is no such run."""
    try:
        return read_events(run_dir / "events.jsonl")
    except OSError as error:
        raise UserError(f"{run_dir} has no readable events.jsonl, so it is not a run: {error}") from None
