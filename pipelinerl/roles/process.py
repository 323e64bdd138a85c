"""What every role needs when its process starts: who it is, where its peers are, its secrets, its log.

A role is started by the launcher or by hand, with the same arguments. Its main catches what is meant for people: a
`UserError` is one sentence on stderr and exit status 2; anything else leaves a traceback in the log and status 1.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import AddressError, UserError
from pipelinerl.observability.logs import ProcessLog, configure
from pipelinerl.observability.redaction import without_secrets
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.streams.stream import Stream
from pipelinerl.system.files import make_private
from pipelinerl.system.garbage import collect_as_usual

log = logging.getLogger("pipelinerl")

#: Where a token may also come from, when no file is named.
TOKEN_VARIABLE = "PIPELINERL_TOKEN"
#: Where the address of the streams may come from, with its password, when no argument gives it; before the recipe.
REDIS_VARIABLE = "PIPELINERL_REDIS_URL"
#: The file with the password of an embedded server that is on another host than this role; the launcher names it.
REDIS_PASSWORD_VARIABLE = "PIPELINERL_REDIS_PASSWORD_FILE"
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One role's process: its recipe, its name, and the addresses of its peers."""

    config: RunConfig
    run_dir: Path
    name: str
    redis_url: str = field(repr=False)
    controller_url: str
    token: str | None = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def launch(self) -> str:
        """Tells this launch of the run from others, by the token that was made for it, and does not give that away."""
        return "" if self.token is None else hashlib.sha256(self.token.encode()).hexdigest()[:16]

    async def stream(self) -> Stream:
        """The run's streams. Raises AddressError when the server does not answer."""
        return await open_stream(_with_password(self.redis_url, self.run_dir), namespace=self.config.run.name)

    def log(self) -> ProcessLog:
        """Begin to log under this role's name."""
        return configure(run=self.config.run.name, role=self.name)


def read_token(token_file: Path | None) -> str | None:
    """The bearer token of the run: from the file, else from the environment, else none.

    Raises:
        UserError: the file does not hold one.
    """
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = json.loads(token_file.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        token = None
    if not isinstance(token, str) or not token:
        raise UserError(f'{token_file} must hold {{"token": "…"}}; the launcher makes it as runs/<name>/tokens.json')
    return token


def token_of(token_file: Path | None, run_dir: Path) -> str:
    """The bearer token of a role: as `read_token`, else the one in the run's directory, which is made if need be.

    So roles that are started one by one on a machine agree on a token that nobody had to think of, and none serves
    without. Raises UserError as `read_token` does, and where no token can be left.
    """
    given = read_token(token_file)
    if given is not None:
        return given
    shared = run_dir / "tokens.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if make_private(shared, json.dumps({"token": secrets.token_urlsafe(32)})):
            print(
                f"pipelinerl: no token was given, so one was made: {shared}. Roles in this directory find it there; "
                f"others take it by --token-file or ${TOKEN_VARIABLE}",
                file=sys.stderr,
            )
    except OSError as error:
        raise UserError(
            f"no token was given, and none can be left at {shared}: {error.strerror}; say --token-file, "
            f"${TOKEN_VARIABLE}, or --no-token to serve whatever program asks on this machine"
        ) from None
    return str(read_token(shared))


def freeze_gc() -> None:
    """What has been loaded stays: take it out of garbage collection.

    A full collection stops every thread of the process until it has looked at every object; with torch and transformers
    loaded that is a pause of 0.2 s and more in whatever is under way, a weight update or a decode step.
    """
    gc.collect()
    gc.freeze()
    collect_as_usual()


def _with_password(redis_url: str, run_dir: Path) -> str:
    """The embedded server's password lies beside its data, so that it need not stand in a command line."""
    parts, named = urlsplit(redis_url), os.environ.get(REDIS_PASSWORD_VARIABLE)
    password = Path(named) if named else run_dir / "redis" / "password"
    is_ours = named is not None or parts.hostname in ("127.0.0.1", "localhost")
    if parts.password is not None or not is_ours or not password.is_file():
        return redis_url
    return parts._replace(netloc=f":{password.read_text()}@{parts.netloc}").geturl()


def run_until_signalled(role: Callable[[Identity], Coroutine[Any, Any, None]], identity: Identity) -> None:
    """Run a role on uvloop; SIGTERM and SIGINT cancel it, and its `finally` clauses put things in order.

    Until it waits for the first time a role imports and loads, for many seconds, in which the loop hears nothing: a
    signal cancels it in the middle of that.

    Exits the process: 0 when its work was done, 143 when a signal stopped it, 2 after a user error, 1 after any other.
    """
    identity.log()

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            signal.signal(number, _cancel_here)
        task = asyncio.ensure_future(role(identity))

        def hear() -> None:
            for number in _ENDING:
                loop.add_signal_handler(number, task.cancel)

        loop.call_soon(hear)  # the turn after the task's first
        await task

    try:
        uvloop.run(guarded())
    except asyncio.CancelledError:
        log.info("stopped by a signal")
        sys.exit(128 + signal.SIGTERM)  # not 0: for the launcher, a role that was killed has not done its work
    except Exception as error:  # the process' own main: whatever it is, it is said once and ends the process
        sys.exit(_status_of(error))


def _cancel_here(_number: int, _frame: FrameType | None) -> None:
    raise asyncio.CancelledError


def _status_of(error: BaseException) -> int:
    """Say what went wrong and return the exit status."""
    causes = _leaves(error)
    if all(isinstance(cause, UserError) for cause in causes):
        print(without_secrets("\n".join(f"pipelinerl: {cause}" for cause in causes)), file=sys.stderr)
        # A peer that cannot be reached may come back: the supervisor should try again.
        return 1 if any(isinstance(cause, AddressError) for cause in causes) else 2
    for cause in causes:
        log.error("%s: %s", type(cause).__name__, cause, exc_info=cause)
    return 1


def _leaves(error: BaseException) -> list[BaseException]:
    """What has really happened, each once: a failure may reach a group by two of its tasks."""
    if isinstance(error, BaseExceptionGroup):
        return list(dict.fromkeys(leaf for child in error.exceptions for leaf in _leaves(child)))
    return [error]
