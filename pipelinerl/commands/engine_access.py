"""How any OpenAI client can reach the engines of a live run: their URL, the model's name and the API key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipelinerl.commands.remote import is_url
from pipelinerl.config.recipe import load_run
from pipelinerl.errors import UserError
from pipelinerl.observability.status import EngineStatus
from pipelinerl.roles.process import TOKEN_VARIABLE

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
    """Describe the engines' URL, the model and the API key in one line; the URL is left out if no engine serves."""
    serving = [engine.url for engine in engines if engine.serves]
    more = f" and {len(serving) - 1} more" if len(serving) > 1 else ""
    where = [f"OpenAI API at {serving[0]}/v1{more}"] if serving else []
    model = [f"model {name}"] if (name := _model_of(run)) is not None else []
    key = f"key in ${TOKEN_VARIABLE}" if is_url(run) else f'key is "token" in {_tokens_of(run)}'
    return ", ".join([*where, *model, key])


def client_snippet(run: str, engines: Sequence[EngineStatus]) -> str:
    """Return a Python program that sends a request to the first serving engine.

    Raises:
        UserError: no engine serves.
    """
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
    """Return the model name that the run's engines accept: the last part of the model directory's path.

    None if the recipe is not on this machine.
    """
    if is_url(run) or not (Path(run) / "recipe.toml").is_file():
        return None
    return load_run(Path(run)).model.path.removeprefix("shipped:").rstrip("/").rpartition("/")[2]
