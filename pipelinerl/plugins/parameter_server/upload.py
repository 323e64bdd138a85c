"""`Uploader`: uploads versions from the trainer to the parameter servers. It blocks, so run it on a separate thread.

    announce to all ─▶ per shard: does a server hold it? ─ no ─▶ write it to one server, seal ─▶ its replicas copy it

A version is divided into shards; each shard is held by servers of its own (replicas). The trainer sends the bytes once,
whatever the number of replicas: into the server's memory if this process can map it, else by PUT in buckets. Buckets
alternate between shards, so that all servers receive bytes while the trainer still gathers. Trainer and server both
hash the bytes before the server seals the version. A shard that a server already holds is not sent again, for example
when the version is published again for an engine that joined late.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_contract import routes
from inference_contract.errors import ContractError, DigestMismatch, NotPrepared, Overloaded, StaleVersion
from pipelinerl.errors import DeadlineError, FencedError, PipelineError, ServerLost, UpdateError
from pipelinerl.plugins.parameter_server import connection
from pipelinerl.plugins.parameter_server.connection import (
    Announcement,
    CopyOrder,
    Key,
    ProgressReport,
    Seal,
    ServerClient,
    ServerState,
    ShardSpec,
    VersionRecord,
)
from pipelinerl.plugins.parameter_server.shared_memory import Attachment, Attachments
from pipelinerl.plugins.parameter_server.version_table import named
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.publisher import Publication

#: Bytes sent by HTTP are gathered and sent in buckets of about this size.
BUCKET_BYTES: Final = 16 * 2**20
#: Least number of buckets per shard, so that shards are about equal in size although tensors are not split. The largest
#: of 8 shards of Llama-3-70B or Qwen2.5-7B is 0.1 % above the mean. For small models on many servers the excess is
#: larger: for Qwen2.5-0.5B, whose embedding is a quarter of the model, 10 % with 4 shards and 120 % with 8.
_BUCKETS_PER_SHARD: Final = 8

#: Seconds before a full or unreachable server is retried (`_AGAIN_S`), and the longest wait for an answer
#: (`_ANSWER_S`).
_AGAIN_S: Final = 0.1
_ANSWER_S: Final = 10.0
#: Seconds between two warnings about a version that waits for a server.
_WARN_EVERY_S: Final = 10.0

#: Temporary failures: a server restarts or has just restarted, a server is full, or bytes were corrupted.
_PASSING: Final = (ServerLost, NotPrepared, Overloaded, DigestMismatch)

log = logging.getLogger("pipelinerl")

T = TypeVar("T")
Memory = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Locations of an uploaded version: each shard's servers in the order to try; and why other servers failed."""

    sources: tuple[tuple[str, ...], ...]
    bucket_bytes: int
    digest: str
    failed: dict[str, str]


class Uploader:
    """Uploads versions to a run's parameter servers. Only one thread may use it at a time."""

    def __init__(self, urls: Sequence[str], *, token: str | None, shards: int = 1, shared_memory: bool = True) -> None:
        """Assign shard 0 to the first `len(urls) / shards` servers, and so on. Raises ValueError if that is uneven."""
        replicas, over = divmod(len(urls), shards)
        if not replicas or over:
            raise ValueError(f"expected as many parameter servers for each of {shards} shards, got {len(urls)} in all")
        self._clients = {url: ServerClient(url, token=token) for url in urls}
        self._shard_of = {url: at // replicas for at, url in enumerate(urls)}
        self._shards = shards
        self._shared_memory = shared_memory
        self._attached = Attachments(writable=True)
        self._replicas: dict[str, Key] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def upload(self, publication: Publication, progress: dict[str, Key | None], *, deadline: float) -> Uploaded:
        """Upload the version to every reachable server; wait until one of each shard is reachable and has room. Servers
        keep old versions only for one another and the engines of `progress`, which has their versions by URL. Raises
        FencedError, and at `deadline` (monotonic) UpdateError with each server's reason.
        """
        warned_at = -math.inf
        while True:
            try:
                return self._uploaded(publication, progress, deadline)
            except _PASSING as error:
                now = time.monotonic()
                if now > deadline - _AGAIN_S:
                    raise UpdateError(str(error)) from error
                if now > warned_at + _WARN_EVERY_S:
                    warned_at = now
                    log.warning(
                        "version %s waits for a parameter server, %.0f s at most: %s",
                        publication.name,
                        deadline - now,
                        error,
                    )
                time.sleep(_AGAIN_S)

    def _uploaded(self, publication: Publication, progress: dict[str, Key | None], deadline: float) -> Uploaded:
        key, cut = (publication.epoch, publication.version), BUCKET_BYTES
        if self._shards > 1:
            cut = max(1, min(cut, publication.layout.num_bytes // (self._shards * _BUCKETS_PER_SHARD)))
        answers = self._announced(publication, cut, progress, deadline)
        failed = _failures(answers)
        records = [self._first(number, answers) for number in range(self._shards)]
        known = {record.whole for _, record in records if record.whole is not None}
        unsealed = {number: first for number, first in enumerate(records) if first[1].digest is None}
        digests = {number: record.digest for number, (_, record) in enumerate(records) if record.digest is not None}
        if unsealed:
            whole, written = self._poured(publication, cut, unsealed, deadline)
            digests |= written
            known |= {whole}
        if len(known) > 1:
            raise UpdateError(f"version {named(key)} was uploaded before with other bytes, of digests {sorted(known)}")
        (whole,) = known
        copies: dict[str, tuple[str, str]] = {}
        for url, number in self._shard_of.items():
            first, held = records[number][0], answers[url]
            if url != first and isinstance(held, VersionRecord) and held.digest != digests[number]:
                copies[url] = first, digests[number]
        half_s = max(deadline - time.monotonic(), 0.2) / 2
        path = connection.COPY.format(epoch=key[0], version=key[1])

        def copy(client: ServerClient) -> VersionRecord:
            source, digest = copies[client.url]
            order = CopyOrder(source=source, digest=digest, whole=whole, timeout_s=half_s)
            return client.call("POST", path, VersionRecord, order, deadline=time.monotonic() + half_s)

        failed |= _failures(self._each(copies, copy))
        self._replicas = {url: key for url in self._clients if url not in failed}
        sources = tuple(tuple(url for url in self._replicas if self._shard_of[url] == n) for n in range(self._shards))
        return Uploaded(sources, cut, whole, failed)

    def _announced(
        self, publication: Publication, cut: int, progress: dict[str, Key | None], deadline: float
    ) -> dict[str, VersionRecord | Exception]:
        members = {**progress, **{url: self._replicas.get(url) for url in self._clients}}
        announcements = [
            Announcement(
                epoch=publication.epoch,
                version=publication.version,
                layout=publication.layout,
                shard=ShardSpec(number=number, count=self._shards, bucket_bytes=cut),
                progress=members,
            )
            for number in range(self._shards)
        ]
        soon = min(deadline, time.monotonic() + _ANSWER_S)

        def announce(client: ServerClient) -> VersionRecord:
            body = announcements[self._shard_of[client.url]]
            return client.call("POST", connection.VERSIONS, VersionRecord, body, deadline=soon)

        answers = self._each(self._clients, announce)
        for url, answer in answers.items():
            if isinstance(answer, StaleVersion) and answer.param == "epoch":
                raise FencedError(f"parameter server {url}: {answer}")
        return answers

    def _first(self, number: int, answers: Mapping[str, VersionRecord | Exception]) -> tuple[str, VersionRecord]:
        """Return a server for shard `number`, and its record of the version; prefer a server that holds the shard."""
        mine = {url: answer for url, answer in answers.items() if self._shard_of[url] == number}
        records = [(url, answer) for url, answer in mine.items() if isinstance(answer, VersionRecord)]
        if not records:
            passing = all(isinstance(answer, (*_PASSING, DeadlineError)) for answer in mine.values())
            reasons = "; ".join(f"{url}: {reason}" for url, reason in mine.items())
            what = "the version" if self._shards == 1 else f"shard {number} of {self._shards} of the version"
            raise (ServerLost if passing else UpdateError)(f"no parameter server takes {what}: {reasons}")
        return next((record for record in records if record[1].digest is not None), records[0])

    def confirm(self, epoch: int, progress: dict[str, Key | None], *, deadline: float) -> dict[str, str]:
        """Report the versions of engines and servers to all; return failures by URL, which the next call mends."""
        report = ProgressReport(epoch=epoch, progress={**progress, **self._replicas})

        def confirm(client: ServerClient) -> ServerState:
            return client.call("POST", connection.PROGRESS, ServerState, report, deadline=deadline)

        return _failures(self._each(self._clients, confirm))

    def _poured(
        self, publication: Publication, cut: int, to: Mapping[int, tuple[str, VersionRecord]], deadline: float
    ) -> tuple[str, dict[int, str]]:
        with ExitStack() as open_writers:
            writers = {}
            for number, (url, record) in to.items():
                mapped = self._attached.to(url, record.segment) if self._shared_memory and record.segment else None
                writer = ShardWriter(self._clients[url], record, mapped, deadline=deadline)
                writers[number] = open_writers.enter_context(writer)
            return write_shards(publication, writers, shards=self._shards, bucket_bytes=cut, deadline=deadline)

    def _each(self, urls: Iterable[str], call: Callable[[ServerClient], T]) -> dict[str, T | Exception]:

        def guarded(client: ServerClient) -> T | Exception:
            try:
                return call(client)
            except (ContractError, PipelineError) as error:
                return error

        clients = {url: self._clients[url] for url in urls}
        with ThreadPoolExecutor(max(len(clients), 1), thread_name_prefix="parameter-servers") as pool:
            return dict(zip(clients, pool.map(guarded, clients.values()), strict=True))


def _failures(answers: Mapping[str, object]) -> dict[str, str]:
    return {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}


def write_shards(
    publication: Publication,
    writers: Mapping[int, ShardWriter],
    *,
    shards: int,
    bucket_bytes: int,
    deadline: float,
) -> tuple[str, dict[int, str]]:
    """Write those shards that have a writer (by shard number), and seal them; return the digests of the whole version
    and of each. Raises UpdateError if the trainer deviates from its layout or a server is lost, a server's
    ContractError, or DeadlineError.
    """
    from pipelinerl.weights.broadcast.collective import shared_tensor
    from pipelinerl.weights.broadcast.sender import packed

    layout, whole = publication.layout, WeightDigest()
    bounds = layout.buckets(bucket_bytes)
    largest = max((end - start for start, end in bounds), default=0)
    # Last in, first out: the system gives memory to a buffer at its first use, and some buffers may never be used.
    buffers = queue.LifoQueue[Memory]()
    for _ in range(len(writers) + 1):
        buffers.put(np.empty(largest, np.uint8))
    inorder = sorted(
        (*held, number) for number, ranges in enumerate(layout.shards(shards, bucket_bytes)) for held in ranges
    )
    ends = [end for _, end, _ in inorder]
    owners = {start: inorder[bisect_right(ends, start)][2] for start, _ in bounds}
    lent: Memory | None = None

    def room(start: int, end: int) -> Any:
        nonlocal lent
        writer = writers.get(owners[start])
        if writer is not None and writer.target is not None:
            lent = None
            return shared_tensor(writer.target.bytes[start:end])
        try:
            lent = buffers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise DeadlineError("the parameter servers did not take the weights in time") from None
        return shared_tensor(lent[: end - start])

    def give_back(memory: Memory | None) -> None:
        if memory is not None:
            buffers.put(memory)

    for (start, end), filled in zip(bounds, packed(layout, publication.weights, bounds, room), strict=True):
        memory = filled.numpy()
        whole.update(memory)
        free = partial(give_back, lent)
        writer = writers.get(owners[start])
        if writer is None:
            free()
        else:
            writer.put(memory, start, then=free)
        if time.monotonic() > deadline:
            raise DeadlineError(f"the weights were not gathered in time: {end} of {layout.num_bytes} bytes")
    digest = whole.hexdigest()
    sealing = {number: writer.seal(digest) for number, writer in writers.items()}
    return digest, {number: sealed.result() for number, sealed in sealing.items()}


class ShardWriter:
    """Writes a shard to a server on a thread of the `with` block; `put` or `seal` raises an earlier error."""

    def __init__(
        self, client: ServerClient, record: VersionRecord, target: Attachment | None, *, deadline: float
    ) -> None:
        """Begin to write the version and shard of `record`, by HTTP unless its memory is mapped (`target`)."""
        self.target: Final = target
        self._client = client
        self._record = record
        self._deadline = deadline
        # A single shard is the whole version, whose digest the sender computes anyway.
        self._digest = WeightDigest() if record.shard.count > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def put(self, memory: Memory, start: int, *, then: Callable[[], None]) -> None:
        """Queue a write of `memory` at offset `start`; call `then` afterwards, even if the write fails."""
        before = self._last
        if before is not None and before.done():
            before.result()

        def write() -> None:
            try:
                if before is not None:
                    before.result()
                if self._digest is not None:
                    self._digest.update(memory)
                if self.target is None:
                    path = routes.WEIGHTS.format(epoch=self._record.epoch, version=self._record.version)
                    self._client.write(path, memory.data, start, self._record.num_bytes, deadline=self._deadline)
            finally:
                then()

        self._last = self._thread.submit(write)

    def seal(self, whole: str) -> Future[str]:
        """Seal the shard after the last `put`; return a future of its verified digest. `whole` is the version's."""
        last = self._last

        def seal() -> str:
            if last is not None:
                last.result()
            seal = Seal(digest=whole if self._digest is None else self._digest.hexdigest(), whole=whole)
            path = connection.SEAL.format(epoch=self._record.epoch, version=self._record.version)
            self._client.call("POST", path, VersionRecord, seal, deadline=self._deadline)
            return seal.digest

        return self._thread.submit(seal)
