"""`Uploader`: puts one version onto the parameter servers, from the trainer's side; blocks, on a thread of its own.

    announce on all ─▶ per shard, does one hold it? ─ no ─▶ write it to one, seal ─▶ the others copy it from that one

A version is cut into shards, each with its servers (replicas); with one shard, every server holds everything. The
trainer's bytes leave it once, whatever the number of replicas: into the server's memory where that can be mapped here,
else by PUT, bucket by bucket, which go to the shards in turn, so that all of them receive while the trainer gathers on.
They are hashed as they leave, and the server hashes what it has before it seals. A shard that a server holds already is
not sent again: that is how a late joiner is served. A version is uploaded when every shard of it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, TypeVar, final

from inference_contract.errors import ContractError, DigestMismatch, NotPrepared, Overloaded, StaleVersion
from inference_contract.weights import WeightLayout
from pipelinerl.errors import DeadlineError, FencedError, PipelineError, ServerLost, UpdateError
from pipelinerl.weights.parameter_server import wire
from pipelinerl.weights.parameter_server.connection import ServerClient
from pipelinerl.weights.parameter_server.retention import Key, named
from pipelinerl.weights.parameter_server.shard_writer import ShardsWritten, ShardWriter, write_shards
from pipelinerl.weights.parameter_server.shared_memory import Access, Attachments
from pipelinerl.weights.parameter_server.wire import (
    Announcement,
    CopyOrder,
    ProgressReport,
    ServerState,
    ShardSpec,
    VersionRecord,
)
from pipelinerl.weights.publisher import Publication

#: What goes by HTTP is gathered and sent in buckets of about this size.
BUCKET_BYTES: Final = 16 * 2**20
#: A shard has at least about so many buckets, so that shards are about equal. Tensors are not cut for that: of
#: Llama-3-70B or Qwen2.5-7B the largest of 8 shards is 0.1 % above the mean, and only small models on many servers fare
#: worse (Qwen2.5-0.5B, whose embedding is a quarter of all: 10 % with 4 shards, 120 % with 8).
_BUCKETS_PER_SHARD: Final = 8

#: How soon a server that is full, or away, is asked again, and how long one is waited for that does not answer.
_AGAIN_S: Final = 0.1
_ANSWER_S: Final = 10.0

#: What passes: a server that starts again, one that did so in the middle, one that is full, bytes that were disturbed.
_PASSING: Final = (ServerLost, NotPrepared, Overloaded, DigestMismatch)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Where a version is held: by shard, the servers to ask first in front; how it was cut; and why not elsewhere."""

    sources: tuple[tuple[str, ...], ...]
    bucket_bytes: int
    digest: str
    failed: dict[str, str]


@final
class Uploader:
    """The parameter servers of a run, by base URL. Used by one thread at a time."""

    def __init__(self, urls: Sequence[str], *, token: str | None, shards: int = 1, shared_memory: bool = True) -> None:
        """The first `len(urls) / shards` servers hold shard 0, and so on.

        Without `shared_memory` bytes go by HTTP even to this host.

        Raises:
            ValueError: shards would have different numbers of servers, or none.
        """
        replicas, over = divmod(len(urls), shards)
        if not replicas or over:
            raise ValueError(f"expected as many parameter servers for each of {shards} shards, got {len(urls)} in all")
        self._clients = {url: ServerClient(url, token=token) for url in urls}
        self._shard_of = {url: at // replicas for at, url in enumerate(urls)}
        self._shards = shards
        self._shared_memory = shared_memory
        self._attached = Attachments(Access.WRITE)
        self._replicas: dict[str, Key] = {}

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def upload(self, publication: Publication, progress: dict[str, Key | None], *, deadline: float) -> Uploaded:
        """Bring the version to every server that can be reached; waits for one of each shard, and for room on it.

        Args:
            progress: what each engine has confirmed; the servers count on these, on one another, and on no other.
            deadline: in monotonic seconds.

        Raises:
            FencedError: a trainer of a later epoch has announced itself.
            UpdateError: no server takes some shard of it; the message names each.
        """
        while True:
            try:
                return self._uploaded(publication, progress, deadline)
            except _PASSING as error:
                if time.monotonic() > deadline - _AGAIN_S:
                    raise UpdateError(str(error)) from error
                time.sleep(_AGAIN_S)

    def _uploaded(self, publication: Publication, progress: dict[str, Key | None], deadline: float) -> Uploaded:
        """One try; what it ends with if it fails may be one of `_PASSING`."""
        key, cut = (publication.epoch, publication.version), self._bucket_bytes(publication.layout)
        answers = self._announced(publication, cut, progress, deadline)
        failed = {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}
        records = [self._first(number, answers) for number in range(self._shards)]
        known = {record.whole for _, record in records if record.whole is not None}
        unsealed = {number: first for number, first in enumerate(records) if first[1].digest is None}
        digests = {number: record.digest for number, (_, record) in enumerate(records) if record.digest is not None}
        if unsealed:
            poured = self._poured(publication, cut, unsealed, deadline)
            digests |= poured.digests
            known |= {poured.whole}
        if len(known) > 1:
            raise UpdateError(f"version {named(key)} was uploaded before with other bytes, of digests {sorted(known)}")
        (whole,) = known
        copies: dict[str, tuple[str, str]] = {}
        for url, number in self._shard_of.items():
            first, held = records[number][0], answers[url]
            if url != first and isinstance(held, VersionRecord) and held.digest != digests[number]:
                copies[url] = first, digests[number]
        failed |= self._copied(key, copies, whole, deadline)
        self._replicas = {url: key for url in self._clients if url not in failed}
        sources = tuple(tuple(url for url in self._replicas if self._shard_of[url] == n) for n in range(self._shards))
        return Uploaded(sources, cut, whole, failed)

    def _bucket_bytes(self, layout: WeightLayout) -> int:
        if self._shards == 1:
            return BUCKET_BYTES
        return max(1, min(BUCKET_BYTES, layout.num_bytes // (self._shards * _BUCKETS_PER_SHARD)))

    def _announced(
        self, publication: Publication, cut: int, progress: dict[str, Key | None], deadline: float
    ) -> dict[str, VersionRecord | Exception]:
        """What each server answers to the announcement. Raises `FencedError`."""
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
            return client.call("POST", wire.VERSIONS, VersionRecord, body, deadline=soon)

        answers = self._each(self._clients, announce)
        for url, answer in answers.items():
            if isinstance(answer, StaleVersion) and answer.param == "epoch":
                raise FencedError(f"parameter server {url}: {answer}")
        return answers

    def _first(self, number: int, answers: Mapping[str, VersionRecord | Exception]) -> tuple[str, VersionRecord]:
        """The server of a shard to read from, or to write to, with its record: one that holds it, if there is one.

        Raises:
            ServerLost, UpdateError: none takes it, for the time being or at all.
        """
        mine = {url: answer for url, answer in answers.items() if self._shard_of[url] == number}
        records = [(url, answer) for url, answer in mine.items() if isinstance(answer, VersionRecord)]
        if not records:
            passing = all(isinstance(answer, (*_PASSING, DeadlineError)) for answer in mine.values())
            reasons = "; ".join(f"{url}: {reason}" for url, reason in mine.items())
            what = "the version" if self._shards == 1 else f"shard {number} of {self._shards} of the version"
            raise (ServerLost if passing else UpdateError)(f"no parameter server takes {what}: {reasons}")
        return next((record for record in records if record[1].digest is not None), records[0])

    def _copied(self, key: Key, copies: Mapping[str, tuple[str, str]], whole: str, deadline: float) -> dict[str, str]:
        """Let servers copy from a source, the shard of this digest; returns why some could not.

        Engines are not kept waiting for them all.
        """
        half_s = max(deadline - time.monotonic(), 0.2) / 2
        path = wire.COPY.format(epoch=key[0], version=key[1])

        def copy(client: ServerClient) -> VersionRecord:
            source, digest = copies[client.url]
            order = CopyOrder(source=source, digest=digest, whole=whole, timeout_s=half_s)
            return client.call("POST", path, VersionRecord, order, deadline=time.monotonic() + half_s)

        answers = self._each(copies, copy)
        return {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}

    def confirm(self, epoch: int, progress: dict[str, Key | None], *, deadline: float) -> dict[str, str]:
        """Tell every server what the engines serve and the replicas hold now; returns why some could not be told.

        The next time will do for those: what is said is always the whole.
        """
        report = ProgressReport(epoch=epoch, progress={**progress, **self._replicas})
        answers = self._each(
            self._clients,
            lambda client: client.call("POST", wire.PROGRESS, ServerState, report, deadline=deadline),
        )
        return {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}

    def _poured(
        self, publication: Publication, cut: int, to: Mapping[int, tuple[str, VersionRecord]], deadline: float
    ) -> ShardsWritten:
        """Write shards, each to one server, and seal them."""
        with ExitStack() as open_writers:
            writers = {}
            for number, (url, record) in to.items():
                mapped = self._attached.to(url, record.segment) if self._shared_memory and record.segment else None
                writer = ShardWriter(self._clients[url], record, mapped, deadline=deadline)
                writers[number] = open_writers.enter_context(writer)
            return write_shards(publication, writers, shards=self._shards, bucket_bytes=cut, deadline=deadline)

    def _each(self, urls: Iterable[str], call: Callable[[ServerClient], T]) -> dict[str, T | Exception]:
        """Call for all at once; errors are answers."""

        def guarded(client: ServerClient) -> T | Exception:
            try:
                return call(client)
            except (ContractError, PipelineError) as error:
                return error

        clients = [self._clients[url] for url in urls]
        if len(clients) < 2:
            return {client.url: guarded(client) for client in clients}
        with ThreadPoolExecutor(len(clients), thread_name_prefix="parameter-servers") as pool:
            return dict(zip([client.url for client in clients], pool.map(guarded, clients), strict=True))
