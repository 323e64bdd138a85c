"""Process logs with one JSON object per line, and removal of secrets from text that leaves a process.

    {"time": 1760000000.123, "level": "info", "run": "tiny", "role": "engine-0", "step": 12, "model_version": 12,
     "message": "weights committed"}

Every line of the process, including lines of third-party libraries, has these fields; passwords in addresses are
removed. `ProcessLog.at` updates `step` and `model_version`. The logging argument `extra={"facts": {...}}` adds fields
to one line.

All text that leaves a process passes through `without_secrets`: log lines, reports, copies of recipes and events,
messages with addresses, and texts of a user's reward function. The run's token is never put into any text.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tomllib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final, TextIO

import tomli_w

#: Loggers of libraries whose messages are only logged from `warning` on, since their `info` is irrelevant to a run.
_TALKATIVE = ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "matplotlib", "asyncio", "filelock", "urllib3")


class ProcessLog:
    """The log formatter of a process; `configure` creates it."""

    def __init__(self, run: str, role: str) -> None:
        self._facts: dict[str, Any] = {"run": run, "role": role, "step": None, "model_version": None}

    def at(self, *, step: int | None = None, model_version: int | None = None) -> None:
        """Set the step and model version for subsequent lines; None leaves a value unchanged."""
        if step is not None:
            self._facts["step"] = step
        if model_version is not None:
            self._facts["model_version"] = model_version

    def line(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._facts,
            "message": record.getMessage(),
        }
        if record.name != "pipelinerl":
            fields["logger"] = record.name
        extra = getattr(record, "facts", None)
        if isinstance(extra, Mapping):
            fields.update(extra)
        if record.exc_info:
            fields["trace"] = logging.Formatter().formatException(record.exc_info)
        return without_secrets(json.dumps(fields, default=str))


def configure(*, run: str, role: str, stream: TextIO | None = None) -> ProcessLog:
    """Make all loggers of this process write JSON lines to `stream` (default stderr), and nowhere else."""
    log = ProcessLog(run, role)
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = logging.Formatter()
    formatter.format = log.line  # type: ignore[method-assign]  # composition: our line, not a subclass of theirs
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return log


#: Patterns for the user and password in an address: before the host, and in the query, where redis-py accepts them.
_USER_INFO: Final = re.compile(r"""(?<=://)[^/?#\s"']*@""")
_USER_QUERY: Final = re.compile(
    r"""(?:(?<=[?&])|(?<=&amp;))(?:username|password|(?:access_|auth_)?token|api_?key|secret)=[^&#\s"']*(?:&(?:amp;)?)?"""
)
#: Pattern for keys of well-known services (OpenAI and similar, Hugging Face, GitHub, AWS, Slack), and for text after
#: `Bearer` in a header.
_KEY: Final = re.compile(
    r"\b(?:[sr]k-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,})"
    r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
)


def without_secrets(text: str) -> str:
    """Return `text` with users and passwords in addresses, and everything that looks like a key, removed."""
    return _KEY.sub("[key]", _USER_QUERY.sub("", _USER_INFO.sub("", text)))


HIDDEN: Final = "[hidden]"
_SECRET_NAMES: Final = (
    *("password", "passwords", "passwd", "passphrase", "secret", "secrets", "token", "key", "authorization"),
    *("credential", "credentials", "cookie"),
)


def table_without_secrets(value: Any) -> Any:
    """Return a recipe, or a part of it, as people may see it: without secrets, in nested lists and tables too.

    A value is hidden if its key ends like `password`, `token`, `secret`, `key` or `authorization`; so is the argument
    of such an option in a command. Of all other texts, `without_secrets` is kept. Recipes are shown and recorded
    for people only through this function.
    """
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {
            key: _hidden(item) if _is_secret(str(key)) else table_without_secrets(item) for key, item in value.items()
        }
    if not isinstance(value, list | tuple):
        return value
    plain = []
    for before, item in zip([None, *value], value, strict=False):
        name, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        if isinstance(before, str) and before.startswith("-") and _is_secret(before):
            plain.append(_hidden(item))
        else:
            plain.append(f"{name}={HIDDEN}" if equals and _is_secret(name) else table_without_secrets(item))
    return plain


def recipe_without_secrets(text: str) -> str:
    """Return the text of a resolved recipe, with the comments at its top, as `table_without_secrets` shows it."""
    try:
        shown = tomli_w.dumps(table_without_secrets(tomllib.loads(text)))
    except ValueError:
        return "(the recipe cannot be read)"
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    return without_secrets("".join(comments)) + shown


def _is_secret(name: str) -> bool:
    return name.lower().endswith(_SECRET_NAMES)


def _hidden(value: Any) -> Any:
    """Hide all texts and numbers in a value; empty and boolean ones reveal nothing, and stay."""
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return value if value is None or value == "" or isinstance(value, bool) else HIDDEN
