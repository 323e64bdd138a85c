"""`RemoteRunner`: compiles, runs and checks programs at an Oubliette service, over HTTP.

Concurrent work is batched into requests of up to thousands of items. A request names inputs and programs by link, the
hash of data that the service stores; data that the service may lack is sent along, once per request. If the service
fails (`system/service_client.py`), the request is retried for `grace_s`. After that, or if a work item could not be
done, an error is raised and the verdict is masked.

| waits for | at most | unblocked by |
|---|---|---|
| the next heartbeat of the service | `silence_s`, then the request is retried | a heartbeat each second |
| its answer | `timeout_s`, then the request is retried | the service |
| a service that failed | `grace_s`, then `SandboxLost` | its return |
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

from pipelinerl.errors import UserError
from pipelinerl.plugins.oubliette.checkers import CheckerFailed, CustomChecker
from pipelinerl.plugins.oubliette.remote import wire
from pipelinerl.plugins.oubliette.repository import Content, ContentMissing, Link
from pipelinerl.plugins.oubliette.runner import Check, Executed, Program
from pipelinerl.plugins.oubliette.runs import Limits, ProgramResult, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.toolchains import ToolchainMissing
from pipelinerl.system.background import cancel_all
from pipelinerl.system.service_client import (
    Grace,
    RequestRejected,
    ServiceClient,
    ServiceFailed,
    ServiceFull,
    ServiceMalformed,
    ServicePatience,
)

#: Maximum numbers of concurrent requests, of work items per request, and of bytes of content per request. The content
#: is counted before its encoding in JSON, which makes it a third larger.
_REQUESTS: Final = 4
_WORKS: Final = 4096
_CONTENT_BYTES: Final = 12 << 20
_BYTES_PER_WORK: Final = 4096
_BYTES_BESIDE: Final = 1 << 16
_FULL_PAUSE_S: Final = 0.25

_BINARY: Final = {"content-type": "application/octet-stream"}


@dataclass(frozen=True, slots=True)
class _PendingWork:
    work: wire.Work
    contents: dict[Link, bytes]
    done: asyncio.Future[wire.Done]


class RemoteRunner:
    """A `CodeRunner` that uses an Oubliette service. Use and close it in a single event loop."""

    def __init__(self, client: ServiceClient, url: str, status: wire.OublietteStatus) -> None:
        self.tier: Final = f"remote {status.tier}"
        self.at_once: Final = max(1, status.at_once)
        self._client = client
        self._url = url
        self._languages = status.languages
        self._waiting: deque[_PendingWork] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_REQUESTS)

    @classmethod
    async def open(
        cls, url: str, *, token: str | None, tier: Tier, patience: ServicePatience = ServicePatience()
    ) -> Self:
        """Connect to a service with a sandbox of at least `tier`. The caller must close the runner.

        Raises `SandboxMissing` if there is no suitable service at `url`, and `SandboxLost` if it cannot be reached now.
        """
        url = url.rstrip("/")
        client = ServiceClient("an Oubliette service", token=token, patience=patience)
        try:
            if urlsplit(url).scheme not in ("http", "https"):
                raise UserError(f"oubliette.url must be http://host:port, got {url!r:.200}")
            status = await client.get(url + wire.STATUS, wire.OublietteStatus, most_bytes=1 << 20)
            if status.protocol != wire.PROTOCOL:
                problem = f"speaks protocol {status.protocol}, this is {wire.PROTOCOL}: use one version of pipelinerl"
                raise SandboxMissing(f"the Oubliette service at {url} {problem}")
            if status.tier.strength < tier.strength:
                raise SandboxMissing(f"the {tier} sandbox is required; {url} has the {status.tier} one")
            return cls(client, url, status)
        except BaseException as error:
            await client.close()
            if isinstance(error, RequestRejected) and error.status == 401:
                raise SandboxMissing(f"{url} rejects the token: {error}") from None
            if isinstance(error, ServiceMalformed):
                raise SandboxMissing(str(error)) from None
            if isinstance(error, RequestRejected | ServiceFailed | ServiceFull):
                raise SandboxLost(str(error)) from None
            raise

    async def compile(self, language: str, source: str, *, wall_s: float) -> Program | ProgramResult:
        """Compile at the service, which stores the program. A Python program needs no compiling, so nothing is sent."""
        if language not in self._languages:
            known = ", ".join(self._languages)
            raise ToolchainMissing(f"{language} is not installed at {self._url}, which has {known}")
        if language == "python":
            return Program(language, source.encode("utf-8", "replace"))
        contents: dict[Link, bytes] = {}
        link = _named(source.encode("utf-8", "replace"), contents)
        done = await self._done(wire.CompileWork(language=language, source=link, wall_s=wall_s), contents)
        if isinstance(done, wire.Compiled):
            return Program(language, self._link(done.program), done.wall_s)
        return self._result(done)

    async def run(self, program: Program, stdin: Content, limits: Limits) -> Executed:
        contents: dict[Link, bytes] = {}
        work = wire.RunWork(
            language=program.language,
            program=_named(program.content, contents),
            input=_named(stdin, contents),
            limits=limits,
        )
        done = await self._done(work, contents)
        result = self._result(done)
        assert isinstance(done, wire.Ended), "anything else has no result"
        return Executed(result, self._link(done.output))

    async def check(self, check: Check) -> float:
        contents: dict[Link, bytes] = {}
        checker = check.checker
        work = wire.CheckWork(
            how=None if isinstance(checker, CustomChecker) else checker,
            checker=checker_program(checker, contents) if isinstance(checker, CustomChecker) else None,
            tolerance=check.tolerance,
            input=_named(check.input, contents),
            output=_named(check.output, contents),
            answer=_named(check.answer, contents),
        )
        done = await self._done(work, contents)
        if not isinstance(done, wire.Checked):
            raise self._odd(done)
        return done.share

    async def compile_checker(self, checker: CustomChecker) -> Link:
        """Compile a checker into the service's repository. Raises `CheckerFailed` if that fails."""
        contents: dict[Link, bytes] = {}
        done = await self._done(wire.CompileChecker(checker=checker_program(checker, contents)), contents)
        if not isinstance(done, wire.Compiled):
            raise self._odd(done)
        return self._link(done.program)

    async def missing(self, links: list[Link]) -> set[Link]:
        """Return those of `links` whose data the service does not store. Raises `SandboxLost`."""
        body = msgspec.json.encode(wire.MissingRequest(tuple(map(str, links))))
        try:
            missing = await self._client.post(
                self._url + wire.MISSING, body, wire.Missing, most_bytes=100 * len(links) + 1024
            )
        except (ServiceFailed, ServiceFull, RequestRejected) as error:
            raise SandboxLost(str(error)) from None
        return {self._link(text) for text in missing.links}

    async def upload(self, data: bytes) -> Link:
        """Upload `data` to the service's repository and return its link. Raises `SandboxLost`."""
        content = await self._content("PUT", data)
        try:
            return self._link(msgspec.json.decode(content, type=wire.Stored).link)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise SandboxLost(f"{self._url} is not an Oubliette service: {error}") from None

    async def read(self, content: Content) -> bytes:
        """Return the bytes of `content`, which is fetched from the service if it is a link."""
        if isinstance(content, bytes):
            return content
        data = await self._content("GET", link=content)
        if Link.of(data) != content:
            raise ContentMissing(f"{self._url} returned other data for {content}")
        return data

    async def close(self) -> None:
        await cancel_all([*self._requests, *([self._sender] if self._sender else [])])
        for item in self._waiting:
            _fail(item, SandboxLost("the runner is closed"))
        await self._client.close()

    async def _content(self, method: str, data: bytes | None = None, *, link: Link | None = None) -> bytes:
        headers, query = _BINARY if data is not None else None, {"link": str(link)} if link else None
        most_bytes = max(_BYTES_BESIDE, link.size if link else 0)
        url = self._url + wire.CONTENT
        try:
            return await self._client.content(method, url, data, headers=headers, query=query, most_bytes=most_bytes)
        except RequestRejected as error:
            raise (ContentMissing if error.status == 404 else SandboxLost)(str(error)) from None
        except (ServiceFailed, ServiceFull) as error:
            raise SandboxLost(str(error)) from None

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _done(self, work: wire.Work, contents: dict[Link, bytes]) -> wire.Done:
        """Send a work item to the service and return the result; if it fails, raise the exception for the cause."""
        item = _PendingWork(work, contents, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        done = await item.done
        if isinstance(done, wire.NotDone):
            raise _ERRORS.get(done.cause, SandboxLost)(f"{self._url}: {done.why}")
        return done

    async def _send(self) -> None:
        while self._waiting:
            await self._room.acquire()
            batch: list[_PendingWork] = []
            sent: set[Link] = set()
            while self._waiting and len(batch) < _WORKS:
                item = self._waiting[0]
                links = sent | item.contents.keys()
                if batch and sum(link.size for link in links) > _CONTENT_BYTES:
                    break
                self._waiting.popleft()
                if not item.done.done():
                    batch.append(item)
                    sent = links
            if not batch:
                self._room.release()
                continue
            request = asyncio.create_task(self._request(batch))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    async def _request(self, batch: list[_PendingWork]) -> None:
        try:
            for item, done in zip(batch, await self._answered(batch), strict=True):
                if not item.done.done():
                    item.done.set_result(done)
        except (ServiceFailed, RequestRejected) as error:
            for item in batch:
                _fail(item, SandboxLost(str(error)))
        except asyncio.CancelledError:
            for item in batch:
                _fail(item, SandboxLost("the runner is closed"))
            raise
        finally:
            self._room.release()

    async def _answered(self, batch: list[_PendingWork]) -> tuple[wire.Done, ...]:
        contents = {link: data for item in batch for link, data in item.contents.items()}
        request = wire.WorkRequest(
            protocol=wire.PROTOCOL, contents=tuple(contents.values()), works=tuple(item.work for item in batch)
        )
        body = msgspec.json.encode(request)
        most_bytes = _BYTES_BESIDE + _BYTES_PER_WORK * len(batch)
        grace = Grace(self._client.patience.grace_s)
        while True:
            try:
                answer = await self._client.post(self._url + wire.WORK, body, wire.WorkAnswer, most_bytes=most_bytes)
                if len(answer.done) != len(batch):
                    raise ServiceFailed(f"{self._url} answered {len(answer.done)} of {len(batch)} pieces of work")
                return answer.done
            except ServiceFull:
                await asyncio.sleep(_FULL_PAUSE_S)
            except ServiceFailed as error:
                await grace.pause(error)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _result(self, done: wire.Done) -> ProgramResult:
        if not isinstance(done, wire.Ended):
            raise self._odd(done)
        return ProgramResult(
            ending=done.ending,
            code=done.code,
            stdout=done.head,
            stderr=done.stderr,
            cpu_s=done.cpu_s,
            wall_s=done.wall_s,
            tier=done.tier,
        )

    def _link(self, text: str) -> Link:
        try:
            return Link.parsed(text)
        except ValueError as error:
            raise SandboxLost(f"{self._url} sent an invalid link: {error}") from None

    def _odd(self, done: wire.Done) -> SandboxLost:
        return SandboxLost(f"{self._url} answered {type(done).__name__}, which was not requested")


_ERRORS: Final[dict[str, type[Exception]]] = {
    wire.NO_CONTENT: ContentMissing, wire.CHECKER: CheckerFailed, wire.NO_TOOLCHAIN: ToolchainMissing
}  # fmt: skip


def checker_program(checker: CustomChecker, contents: dict[Link, bytes]) -> wire.CheckerProgram:
    """Convert a checker to its wire form: data is replaced by its link, and added to the `contents` to send along."""
    given = [(name, _named(text.encode("utf-8", "surrogatepass"), contents)) for name, text in checker.files]
    source = "" if checker.program is not None else _named(checker.source.encode("utf-8", "surrogatepass"), contents)
    return wire.CheckerProgram(
        language=checker.language,
        protocol=checker.protocol,
        source=source,
        files=tuple(given),
        program="" if checker.program is None else _named(checker.program, contents),
    )


def _named(content: Content, contents: dict[Link, bytes]) -> str:
    """Return the link of `content` as text; if `content` is bytes, add it to `contents`."""
    if isinstance(content, Link):
        return str(content)
    link = Link.of(content)
    contents[link] = content
    return str(link)


def _fail(item: _PendingWork, error: Exception) -> None:
    if not item.done.done():
        item.done.set_exception(error)
