"""The start and end of a role's process: its name, its peers' addresses, its secrets, its log, and its exit status.

The launcher and users start roles with the same arguments. A `UserError` is printed as one sentence on stderr and ends
the process with status 2, or with 1 if a peer was unreachable and a restart may help. Any other exception leaves a
traceback in the log and ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import uvloop

from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.errors import AddressError, UserError
from pipelinerl.observability.logs import ProcessLog, configure, without_secrets
from pipelinerl.observability.samples import FOLDER, SampleLog, visible
from pipelinerl.roles.dtypes import settled, with_plain_models
from pipelinerl.roles.role import LOCAL_REDIS, REDIS_PASSWORD_VARIABLE, RoleOptions
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import Stream
from pipelinerl.system.files import make_private
from pipelinerl.system.process import collect_as_usual
from pipelinerl.system.references import last_line
from pipelinerl.system.secret_variables import read_secret

log = logging.getLogger("pipelinerl")

#: Environment variable with the bearer token, for a role that is started without a token file.
TOKEN_VARIABLE = "PIPELINERL_TOKEN"
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The settings of one process: the recipe, the process's name, the addresses of its peers, and its own address."""

    config: RunConfig
    run_dir: Path
    name: str
    redis_url: str = field(default="", repr=False)
    controller_url: str = ""
    token: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def launch(self) -> str:
        """An id of this launch of the run, derived from the bearer token without revealing the token."""
        return "" if self.token is None else hashlib.sha256(self.token.encode()).hexdigest()[:16]

    async def stream(self) -> Stream:
        """Open the run's streams; raise `AddressError` if the stream server does not answer."""
        # Read the embedded server's password from the file next to its data, so that no command line contains it.
        url, parts, named = self.redis_url, urlsplit(self.redis_url), read_secret(REDIS_PASSWORD_VARIABLE)
        password = Path(named) if named else self.run_dir / "redis" / "password"
        is_ours = named is not None or parts.hostname in ("127.0.0.1", "localhost")
        if parts.password is None and is_ours and password.is_file():
            url = parts._replace(netloc=f":{password.read_text()}@{parts.netloc}").geturl()
        return await open_stream(url, namespace=self.config.run.name)

    def log(self) -> ProcessLog:
        """Start to log under this role's name."""
        return configure(run=self.config.run.name, role=self.name)

    def sample_log(self, kind: Literal["training", "evaluation"]) -> SampleLog | None:
        """Open the run's log of training or evaluation samples; return None if the recipe keeps no samples."""
        section = self.config.samples
        if section.log == "off":
            return None
        return SampleLog(self.run_dir / FOLDER, kind, max_bytes=section.max_bytes // 2)


def identity_of(options: RoleOptions, changes: Sequence[str] = ()) -> Identity:
    """Return a process's identity; recipe `changes` apply after those in `options`. Raises `UserError` if invalid."""
    config = settled(with_plain_models(load(options.recipe, [*(options.changes or []), *changes])))
    of_recipe, run_dir = config.streams.redis_url, options.run_dir or config.run_directory
    return Identity(
        config=config,
        run_dir=run_dir,
        name=options.name,
        redis_url=options.redis_url or (of_recipe.get_secret_value() if of_recipe else LOCAL_REDIS),
        controller_url=options.controller_url.rstrip("/"),
        token=None if options.no_token else token_of(options.token_file, run_dir),
        host=options.host,
        port=options.port,
    )


def read_token(token_file: Path | None) -> str | None:
    """Return the bearer token from the file, else from the environment, else None; raise `UserError` for a bad file."""
    if token_file is None:
        return read_secret(TOKEN_VARIABLE) or None
    try:
        token = json.loads(token_file.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        token = None
    if not isinstance(token, str) or not token:
        raise UserError(f'{token_file} must hold {{"token": "…"}}; the launcher writes it to runs/<name>/tokens.json')
    return token


def token_of(token_file: Path | None, run_dir: Path) -> str:
    """Return a role's bearer token: from `read_token`, else from the run's directory, where it is created if needed.

    Roles that are started one by one on a machine thus share a token without the user's help.

    Raises:
        UserError: the token file holds no token, or no token can be written.
    """
    given = read_token(token_file)
    if given is not None:
        return given
    shared = run_dir / "tokens.json"
    try:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        if make_private(shared, json.dumps({"token": secrets.token_urlsafe(32)})):
            print(
                f"pipelinerl: no token was given, so one was made: {shared}. Roles with this directory find it there; "
                f"pass it to others with --token-file or ${TOKEN_VARIABLE}",
                file=sys.stderr,
            )
    except OSError as error:
        raise UserError(
            f"no token was given, and none can be written to {shared}: {error.strerror}; pass --token-file, set "
            f"${TOKEN_VARIABLE}, or pass --no-token to serve every program on this machine"
        ) from None
    return str(read_token(shared))


def freeze_gc() -> None:
    """Exclude all that is loaded from garbage collection, which would pause an update or a decode step by 0.2 s."""
    gc.collect()
    gc.freeze()
    collect_as_usual()


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks (None is ignored) and wait for their end; raise the error of a task that failed by itself."""
    for task in tasks:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def run_until_signalled(role: Callable[[Identity], Coroutine[Any, Any, None]], identity: Identity) -> None:
    """Run a role on uvloop; SIGTERM and SIGINT cancel it, and its `finally` clauses clean up.

    A role imports and loads for many seconds before its first await, while the event loop handles no signals; until
    then, a signal raises CancelledError in the running code. The process exits with status 0 when the role's work is
    done, 143 after a signal, 2 after a user error other than an unreachable peer, and 1 after any other error.
    """
    identity.log()

    def cancel_here(_number: int, _frame: FrameType | None) -> None:
        raise asyncio.CancelledError

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            signal.signal(number, cancel_here)
        task = asyncio.ensure_future(role(identity))

        def handle_signals() -> None:
            for number in _ENDING:
                loop.add_signal_handler(number, task.cancel)

        loop.call_soon(handle_signals)  # runs at the role's first await; from then on, the loop handles signals
        await task

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _run_to_its_end(runner.get_loop(), guarded())
    except asyncio.CancelledError:
        log.info("stopped by a signal")
        sys.exit(128 + signal.SIGTERM)  # 0 would mean that the role's work is done
    except (Exception, KeyboardInterrupt) as error:  # the outermost frame: any error, also of user code, ends it
        sys.exit(_status_of(error))


def _run_to_its_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, although user code exits: event loops stop if a task or a callback raises `SystemExit`.

    The task that raised it has ended with this error, which the code that awaits the task gets.
    """
    task = loop.create_task(work)
    while True:
        try:
            loop.run_until_complete(task)
            return
        except (SystemExit, KeyboardInterrupt) as error:  # signals do not raise it: this process handles them
            if task.done():
                raise
            log.error("user code in this process raised %s; the process continues", last_line(error), exc_info=error)


def _status_of(error: BaseException) -> int:
    """Report the error to the user or the log; return the process's exit status."""
    causes = _leaves(error)
    if all(isinstance(cause, UserError) for cause in causes):
        print(visible(without_secrets("\n".join(f"pipelinerl: {cause}" for cause in causes))), file=sys.stderr)
        # An unreachable peer may come back, so the supervisor should restart this process.
        return 1 if any(isinstance(cause, AddressError) for cause in causes) else 2
    for cause in causes:
        log.error("%s: %s", type(cause).__name__, cause, exc_info=cause)
    return 1


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in nested exception groups, each once, because several tasks may fail with the same error."""
    if isinstance(error, BaseExceptionGroup):
        return list(dict.fromkeys(leaf for child in error.exceptions for leaf in _leaves(child)))
    return [error]
