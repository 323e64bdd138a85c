"""`OublietteService` and its application: compiles, runs and checks programs for clients that have its token.

Each work item of a request gets an answer, in order; a failure to do the work is never reported as a program's failure.
Programs are run by language name: no command and no path comes from the network. A request is abandoned when its client
disconnects. A program's guest holds the program's input and nothing else of the repository.

| waits for | at most | unblocked by |
|---|---|---|
| a run | its own limits | the sandbox, which ends it |
| capacity for a request | – | it is rejected (503, `full`) and retried by the client |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.routing import Route

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.checkers import FILE_NAME, CheckerFailed, CustomChecker
from pipelinerl.plugins.oubliette.remote import wire
from pipelinerl.plugins.oubliette.repository import (
    ContentMissing,
    ContentTooLarge,
    Link,
    PersistentRepository,
    TransientRepository,
)
from pipelinerl.plugins.oubliette.runner import Check, LocalRunner, Program
from pipelinerl.plugins.oubliette.runs import Limits, ProgramResult, SandboxLost, Tier
from pipelinerl.plugins.oubliette.toolchains import ToolchainMissing
from pipelinerl.system.http_service import (
    Backlog,
    BodyRule,
    HeartbeatRoute,
    guard,
    json_response,
    refusal,
    refuse_in_one_shape,
)

#: Upper bounds of the limits that a client may request for a run.
_MOST: Final = Limits(
    cpu_s=600.0, wall_s=1300.0, memory_bytes=16 << 30, output_bytes=64 << 20, error_bytes=64 << 10,
    disk_bytes=1 << 30, inodes=1 << 16, processes=256, open_files=1024,
)  # fmt: skip
_BOUNDED: Final = ("cpu_s", "wall_s", "memory_bytes", "output_bytes", "error_bytes", "disk_bytes", "inodes",
                   "processes", "open_files")  # fmt: skip
#: The cause in the reply to a client, by exception; a `ValueError` means an invalid link.
_CAUSES: Final[dict[type[Exception], str]] = {
    CheckerFailed: wire.CHECKER,
    ToolchainMissing: wire.NO_TOOLCHAIN,
    ContentMissing: wire.NO_CONTENT,
    ValueError: wire.NO_CONTENT,
    SandboxLost: wire.LOST,
    OSError: wire.LOST,
}


class OublietteService:
    """Implementation of an Oubliette service's routes, on one event loop."""

    def __init__(
        self, runner: LocalRunner, *, tier: Tier, persistent: PersistentRepository, transient: TransientRepository
    ) -> None:
        """Create the service; `runner` must use the same `persistent` and `transient` repositories."""
        self._runner = runner
        self._tier = tier
        self.persistent = persistent
        self._transient = transient
        self._backlog = Backlog("pieces of work", protocol=wire.PROTOCOL)
        self._done = 0

    def admit(self, request: wire.WorkRequest) -> None:
        """Raise `RequestRefused` if the request has another protocol version, or the queue is full."""
        self._backlog.admit(len(request.works), protocol=request.protocol)

    async def work(self, request: wire.WorkRequest) -> wire.WorkAnswer:
        with self._backlog.holding(len(request.works)):
            for content in request.contents:
                self._transient.put(content)
            done = await asyncio.gather(*(self._one(work) for work in request.works))
            self._done += len(done)
        return wire.WorkAnswer(done=tuple(done))

    def missing(self, request: wire.MissingRequest) -> wire.Missing:
        """Return those links (hashes of data) whose data is not stored persistently. Raises `ValueError` for others."""
        return wire.Missing(tuple(text for text in request.links if Link.parsed(text) not in self.persistent))

    def status(self) -> wire.OublietteStatus:
        return wire.OublietteStatus(
            protocol=wire.PROTOCOL,
            version=version("pipelinerl"),
            tier=self._tier,
            languages=toolchains.installed(),
            at_once=self._runner.at_once,
            queue=self._backlog.count,
            runs=self._done,
            transient_bytes=self._transient.num_bytes,
        )

    async def close(self) -> None:
        await self._runner.close()

    def read(self, text: str) -> bytes:
        """Return the bytes of a link. Raises `ContentMissing`, or `ValueError` for an invalid link."""
        link = Link.parsed(text)
        return self._transient.get(link) if link in self._transient else self.persistent.get(link)

    async def _one(self, work: wire.Work) -> wire.Done:
        try:
            return await self._tried(work)
        except (*_CAUSES,) as error:
            cause = next(cause for kind, cause in _CAUSES.items() if isinstance(error, kind))
            return wire.NotDone(cause=cause, why=str(error)[: wire.MOST_SHOWN])

    async def _tried(self, work: wire.Work) -> wire.Done:
        match work:
            case wire.RunWork():
                program = Program(work.language, Link.parsed(work.program))
                most = {name: getattr(_MOST, name) for name in _BOUNDED}
                bounded = {name: min(max(getattr(work.limits, name), 0), most[name]) for name in _BOUNDED}
                limits = replace(work.limits, **bounded)
                executed = await self._runner.run(program, Link.parsed(work.input), limits)
                return _ended(executed.result, str(executed.output))
            case wire.CheckWork():
                if (work.how is None) == (work.checker is None):
                    raise CheckerFailed("a check must have either how or checker")
                checker = work.how if work.checker is None else self._checker(work.checker)
                assert checker is not None, "one of both is there"
                check = Check(
                    checker=checker,
                    tolerance=work.tolerance,
                    input=Link.parsed(work.input),
                    output=Link.parsed(work.output),
                    answer=Link.parsed(work.answer),
                )
                return wire.Checked(share=await self._runner.check(check))
            case wire.CompileWork():
                source = self.read(work.source).decode("utf-8", "surrogatepass")
                compiled = await self._runner.compile(work.language, source, wall_s=work.wall_s)
                if isinstance(compiled, ProgramResult):
                    return _ended(compiled, str(self._transient.put(b"")))
                assert isinstance(compiled.content, bytes), "what is compiled here is here"
                return wire.Compiled(program=str(self._transient.put(compiled.content)), wall_s=compiled.compile_s)
            case wire.CompileChecker():
                program_of = await self._runner.checker(self._checker(work.checker))
                return wire.Compiled(program=str(await asyncio.to_thread(self.persistent.put, program_of)))

    def _checker(self, checker: wire.CheckerProgram) -> CustomChecker:
        files = []
        for name, link in checker.files:
            if FILE_NAME.fullmatch(name) is None:
                raise CheckerFailed(f"a checker's files must have plain names, got {name!r:.80}")
            files.append((name, self._text(link)))
        return CustomChecker(
            language=checker.language,
            source=self._text(checker.source) if checker.source else "",
            protocol=checker.protocol,
            files=tuple(files),
            program=Link.parsed(checker.program) if checker.program else None,
        )

    def _text(self, link: str) -> str:
        return self.read(link).decode("utf-8", "surrogatepass")


def _ended(result: ProgramResult, output: str) -> wire.Ended:
    return wire.Ended(
        ending=result.ending,
        code=result.code,
        output=output,
        head=result.stdout[: wire.MOST_SHOWN],
        stderr=result.stderr[-wire.MOST_SHOWN :],
        cpu_s=result.cpu_s,
        wall_s=result.wall_s,
        tier=result.tier,
    )


# --- HTTP --------------------------------------------------------------------------------------------------------


def create_app(service: OublietteService, *, token: str | None) -> FastAPI:
    """Return the application that serves and closes `service`; only /health needs no `token`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="pipelinerl oubliette", lifespan=lifespan, openapi_url=None)
    app.get(wire.HEALTH)(lambda: {"state": "ready"})

    @app.get(wire.STATUS)
    async def status() -> Response:
        return json_response(service.status())

    @app.put(wire.CONTENT)
    async def content(request: Request) -> Response:
        try:
            link = await service.persistent.put_parts(request.stream(), most_bytes=wire.MOST_CONTENT_BYTES)
            return json_response(wire.Stored(str(link)))
        except ContentTooLarge as error:
            return refusal(413, str(error), code=wire.TOO_LARGE)

    @app.get(wire.CONTENT)
    async def read(link: str) -> Response:
        try:
            return Response(await asyncio.to_thread(service.read, link), media_type="application/octet-stream")
        except (ContentMissing, ValueError) as error:
            return refusal(404, str(error), code=wire.NO_CONTENT)

    @app.post(wire.MISSING)
    async def missing(request: Request) -> Response:
        try:
            decoded = msgspec.json.decode(await request.body(), type=wire.MissingRequest)
            return json_response(await asyncio.to_thread(service.missing, decoded))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return refusal(422, str(error), code="invalid_request_error")

    def begin(request: wire.WorkRequest) -> HeartbeatRoute.Work:
        service.admit(request)
        return service.work(request)

    app.router.routes.append(Route(wire.WORK, HeartbeatRoute(wire.WorkRequest, begin), methods=["POST"]))
    refuse_in_one_shape(app)
    guard(app, token=token, puts=BodyRule.STREAMED)
    return app
