"""`Placement`: puts one version onto the parameter servers, from the trainer's side; blocks, on a thread of its own.

    announce on all ─▶ does one hold it already? ─ no ─▶ write it to one, seal ─▶ the others copy it from that one

The trainer's bytes leave it once, whatever the number of replicas: into the server's memory where that can be mapped
here, else by PUT, bucket by bucket. They are hashed as they leave, and the server hashes what it has before it seals.
A version that a server holds already is not sent again: that is how a late joiner is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar, final

import numpy as np

from inference_contract import routes
from inference_contract.errors import ContractError, DigestMismatch, NotPrepared, Overloaded, StaleVersion
from pipelinerl.errors import DeadlineError, FencedError, PipelineError, ServerLost, UpdateError
from pipelinerl.weights import server_wire
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.publisher import Publication
from pipelinerl.weights.retention import Key
from pipelinerl.weights.segment import Access, Attachments
from pipelinerl.weights.server_client import ServerClient
from pipelinerl.weights.server_wire import Announcement, CopyOrder, ProgressReport, Seal, ServerState, VersionRecord

#: What goes by HTTP is gathered and sent in buckets of about this size.
BUCKET_BYTES: Final = 16 * 2**20

#: How soon a server that is full, or away, is asked again, and how long one is waited for that does not answer.
_AGAIN_S: Final = 0.1
_ANSWER_S: Final = 10.0

#: What passes: a server that starts again, one that did so in the middle, one that is full, bytes that were disturbed.
_PASSING: Final = (ServerLost, NotPrepared, Overloaded, DigestMismatch)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a version is held, the servers to ask first in front, and why not elsewhere."""

    sources: tuple[str, ...]
    digest: str
    failed: dict[str, str]


@final
class Placement:
    """The parameter servers of a run, by base URL. Used by one thread at a time."""

    def __init__(self, urls: Sequence[str], *, token: str | None, shared_memory: bool = True) -> None:
        """Without `shared_memory` bytes go by HTTP even to this host."""
        self._clients = {url: ServerClient(url, token=token) for url in urls}
        self._shared_memory = shared_memory
        self._attached = Attachments(Access.WRITE)
        self._replicas: dict[str, Key] = {}

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def place(self, publication: Publication, progress: dict[str, Key | None], *, deadline: float) -> Placed:
        """Bring the version to every server that can be reached; waits for one, and for room on it.

        Args:
            progress: what each engine has confirmed; the servers count on these, on their replicas, and on no other.
            deadline: in monotonic seconds.

        Raises:
            FencedError: a trainer of a later epoch has announced itself.
            UpdateError: no server takes it; the message names each.
        """
        while True:
            try:
                return self._placed(publication, progress, deadline)
            except _PASSING as error:
                if time.monotonic() > deadline - _AGAIN_S:
                    raise UpdateError(str(error)) from error
                time.sleep(_AGAIN_S)

    def _placed(self, publication: Publication, progress: dict[str, Key | None], deadline: float) -> Placed:
        """One try; what it ends with if it fails may be one of `_PASSING`."""
        path = {"epoch": publication.epoch, "version": publication.version}
        members = {**progress, **{url: self._replicas.get(url) for url in self._clients}}
        announcement = Announcement(**path, layout=publication.layout, progress=members)
        soon = min(deadline, time.monotonic() + _ANSWER_S)
        answers = self._each(
            self._clients.values(),
            lambda client: client.call("POST", server_wire.VERSIONS, VersionRecord, announcement, deadline=soon),
        )
        failed = {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}
        records = {url: answer for url, answer in answers.items() if isinstance(answer, VersionRecord)}
        for url, answer in answers.items():
            if isinstance(answer, StaleVersion) and answer.param == "epoch":
                raise FencedError(f"parameter server {url}: {answer}")
        if not records:
            passing = all(isinstance(answer, (*_PASSING, DeadlineError)) for answer in answers.values())
            reasons = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
            raise (ServerLost if passing else UpdateError)(f"no parameter server takes the version: {reasons}")
        first = next((url for url, record in records.items() if record.digest is not None), next(iter(records)))
        digest = records[first].digest or self._push(self._clients[first], publication, records[first], deadline)
        failed |= self._copy(first, [url for url in records if records[url].digest != digest], path, digest, deadline)
        sources = tuple(url for url in self._clients if url not in failed)
        self._replicas = dict.fromkeys(sources, (publication.epoch, publication.version))
        return Placed(sources, digest, failed)

    def _copy(
        self, source: str, urls: Iterable[str], path: dict[str, int], digest: str, deadline: float
    ) -> dict[str, str]:
        """Let the others copy from `source`; returns why some could not. Engines are not kept waiting for them all."""
        half_s = max(deadline - time.monotonic(), 0.2) / 2
        order = CopyOrder(source=source, digest=digest, timeout_s=half_s)
        answers = self._each(
            [self._clients[url] for url in urls if url != source],
            lambda client: client.call(
                "POST", server_wire.COPY.format(**path), VersionRecord, order, deadline=time.monotonic() + half_s
            ),
        )
        return {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}

    def confirm(self, epoch: int, progress: dict[str, Key | None], *, deadline: float) -> dict[str, str]:
        """Tell every server what the engines serve and the replicas hold now; returns why some could not be told.

        The next time will do for those: what is said is always the whole.
        """
        report = ProgressReport(epoch=epoch, progress={**progress, **self._replicas})
        answers = self._each(
            self._clients.values(),
            lambda client: client.call("POST", server_wire.PROGRESS, ServerState, report, deadline=deadline),
        )
        return {url: str(answer) for url, answer in answers.items() if isinstance(answer, Exception)}

    def _push(self, client: ServerClient, publication: Publication, record: VersionRecord, deadline: float) -> str:
        """Write all bytes and seal them; returns the digest."""
        from pipelinerl.weights.collective import shared_tensor
        from pipelinerl.weights.sender import packed

        layout, digest = publication.layout, WeightDigest()
        bounds = layout.buckets(BUCKET_BYTES)
        path = {"epoch": publication.epoch, "version": publication.version}
        target = self._attached.to(client.url, record.segment) if self._shared_memory and record.segment else None
        largest = 0 if target is not None else max(end - start for start, end in bounds)
        memory = np.empty(largest, np.uint8) if target is None else target.bytes
        staging = shared_tensor(memory)
        room = lambda start, end: staging[: end - start] if target is None else staging[start:end]  # noqa: E731
        for (start, end), filled in zip(bounds, packed(layout, publication.weights, bounds, room), strict=True):
            digest.update(filled)
            if target is None:
                where = routes.WEIGHTS.format(**path)
                client.write(where, memory[: end - start].data, start, layout.num_bytes, deadline=deadline)
            if time.monotonic() > deadline:
                raise DeadlineError(f"the weights were not gathered in time: {end} of {layout.num_bytes} bytes")
        seal = Seal(digest=digest.hexdigest())
        client.call("POST", server_wire.SEAL.format(**path), VersionRecord, seal, deadline=deadline)
        return seal.digest

    @staticmethod
    def _each(clients: Iterable[ServerClient], call: Callable[[ServerClient], T]) -> dict[str, T | Exception]:
        """Call for all at once; errors are answers."""

        def guarded(client: ServerClient) -> T | Exception:
            try:
                return call(client)
            except (ContractError, PipelineError) as error:
                return error

        listed = list(clients)
        if len(listed) < 2:
            return {client.url: guarded(client) for client in listed}
        with ThreadPoolExecutor(len(listed), thread_name_prefix="parameter-servers") as pool:
            return dict(zip([client.url for client in listed], pool.map(guarded, listed), strict=True))
