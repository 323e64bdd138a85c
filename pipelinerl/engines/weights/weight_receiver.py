"""`WeightReceiver`: the engine's side of a weight update, for any engine that offers a `WeightTarget`.

    PREPARE ─ check manifest ─▶ armed: a thread receives into the staging buffer and finishes it, decoding continues
              (other dtypes than the engine's arrive in a separate buffer first, and are converted there)
    COMMIT  ─ wait for the bytes ─ compare digests ─▶ target.commit: the swap, between two decode steps
    ABORT   ─▶ the staged weights are dropped

All checks that can reject an update run before the engine enters a collective. The serving weights are untouched until
every byte has arrived and the digest matches. After a failed update the old weights keep serving, and the next update
works. The engine is *dirty* only if `target.commit` itself failed with an unknown error.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| every rank to join | the ranks | the request's timeout; the previous group stays usable meanwhile |
| the bytes | rank 0, or a parameter server, sends, leaves or dies | PREPARE's timeout, for a bucket or a pull |
| the bytes, in COMMIT | the receiving thread | COMMIT's timeout |
| a dropped transfer's end, in the next PREPARE | rank 0 leaves the group; a pull stops | that PREPARE's timeout |
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from inference_contract.errors import (
    ContractError,
    DeadlineExceeded,
    DigestMismatch,
    Dirty,
    InvalidRequest,
    LayoutMismatch,
    NotPrepared,
    StaleVersion,
    UpdateInProgress,
)
from inference_contract.weights import (
    MAX_PIECES,
    MOST_EPOCH_STEP,
    MOST_VERSION_STEP,
    Backend,
    InitProcessGroupRequest,
    OnUpdate,
    ProcessGroupStatus,
    Transport,
    UpdatePhase,
    UpdateStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.engines.weights.group_member import IN_PROCESS, EndpointFactory, GroupMember, as_contract
from pipelinerl.engines.weights.incoming_update import IncomingUpdate, Received, WeightSink
from pipelinerl.system.background import settled
from pipelinerl.weights.layout import converted_by
from pipelinerl.weights.pull import PullSource


class WeightTarget(Protocol):
    """The weights of an engine: a serving buffer, a staging buffer, and a swap."""

    @property
    def layout(self) -> WeightLayout:
        """The model's parameters in the order in which they are received."""
        ...

    def staging(self) -> Any:
        """Return flat uint8 [layout.num_bytes], numpy or torch, which the model does not read until `commit`."""
        ...

    def finish_staging(self) -> None:
        """Process the filled `staging` to make `commit` quick. Called on the receiving thread."""
        ...

    async def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> float:
        """Serve the weights in `staging` from the next decode step on; return the pause in seconds. A `ContractError`
        means that the old weights still serve; any other error leaves the engine dirty.
        """
        ...

    def serving(self) -> tuple[int, int]:
        """Return the (epoch, version) of the serving weights."""
        ...


@dataclass(slots=True)
class ReceiverTotals:
    """Counts of updates and failures so far, and the durations of the last update, for `EngineMetrics`."""

    updates: int = 0
    failures: int = 0
    last_pause_s: float = 0.0
    last_receive_s: float = 0.0


class _Stage(StrEnum):
    RECEIVING = "receiving"
    COMMITTING = "committing"
    DROPPED = "dropped"


@dataclass(slots=True)
class _Update:
    incoming: IncomingUpdate
    stage: _Stage = _Stage.RECEIVING
    committing: asyncio.Task[float] | None = None

    @property
    def request(self) -> WeightUpdateRequest:
        return self.incoming.request

    @property
    def key(self) -> tuple[int, int]:
        return self.request.epoch, self.request.version

    @property
    def dropped(self) -> bool:
        return self.stage is _Stage.DROPPED

    @property
    def replaceable(self) -> bool:
        """True if a new PREPARE may replace this update: it was dropped, failed, or got no bytes for its timeout."""
        if self.stage is _Stage.COMMITTING:
            return False
        return self.dropped or self.incoming.failed or self.incoming.silent

    def given_up_for(self, request: WeightUpdateRequest) -> bool:
        """Return whether `request` pulls a newer version than this pull; a broadcast ends only with its group."""
        pulled = self.request.transport is request.transport is Transport.PULL
        return pulled and self.stage is _Stage.RECEIVING and self.key < (request.epoch, request.version)


class WeightReceiver:
    """Implements the contract's two weight routes for an engine; every method runs on one event loop."""

    def __init__(
        self, target: WeightTarget, *, pull: PullSource | None = None, endpoints: EndpointFactory = IN_PROCESS
    ) -> None:
        self._target = target
        self._pull = pull
        self._endpoints = endpoints
        self._member = GroupMember(endpoints, on_replaced=self._drop)
        self._update: _Update | None = None
        self._epoch = 0
        self._arming = asyncio.Lock()
        self.digest: str | None = None
        """The digest of the serving weights; None for the weights from the model directory."""
        #: The layout that the trainer last sent in full; a request with only a `layout_id` may refer to it.
        self._wire: WeightLayout | None = None
        self._unconverted: Any = None
        self.dirty: str | None = None
        """The reason why the serving weights cannot be trusted; None if they can."""
        self.totals = ReceiverTotals()

    async def close(self) -> None:
        """Leave the group and drop the staged weights."""
        self._drop()
        await self._member.close()

    def _drop(self) -> None:
        """Make the update impossible to commit; give up its transfer unless all bytes have arrived."""
        update = self._update
        if update is not None and update.stage is _Stage.RECEIVING:
            update.stage = _Stage.DROPPED
            if not update.incoming.received.done() or update.incoming.failed:
                update.incoming.give_up()

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """Join the weight group; once formed, a new membership drops the update staged by the previous one. Raises
        `InvalidRequest` if the backend does not reach this engine, and otherwise as `GroupMember.join` does.
        """
        if not self._endpoints.reaches(request.backend, self._target.staging()):
            raise InvalidRequest(
                f"backend must be gloo for this engine, which receives weights on the host, got {request.backend}",
                param="backend",
            )
        if request.backend is Backend.NCCL and self._member.would_begin(request):
            self._drop()
            self._member.leave()  # the join waits until the device has left
        return await self._member.join(request, epoch=max(self._epoch, self._target.serving()[0]))

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """Run one phase of an update; raises the `ContractError` with which it fails."""
        match request.phase:
            case UpdatePhase.PREPARE:
                async with self._arming:
                    return await self._prepare(request)
            case UpdatePhase.COMMIT:
                return await self._commit(request)
            case UpdatePhase.ABORT:
                update, key = self._update, (request.epoch, request.version)
                if update is None or update.key != key or update.stage is not _Stage.RECEIVING:
                    raise NotPrepared(f"update {_named(request)} is not staged here; nothing to abort")
                self._drop()
                return self._answer(UpdateStatus.ABORTED)

    async def _prepare(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        wire = self._checked_layout(request)
        if self._serves(request):
            return self._answer(UpdateStatus.ALREADY_SERVING)
        self._check_transport(request)
        self._take_over(request)
        update = self._update
        if update is not None and not (update.replaceable or update.given_up_for(request)):
            if update.stage is _Stage.RECEIVING and update.incoming.is_of(request):
                return self._answer(UpdateStatus.PREPARED)
            raise UpdateInProgress(
                f"update {_named(update.request)} is being received; commit or abort it before {_named(request)}"
            )
        if update is not None:
            self._drop()
            # Wait until the dropped receive has ended, because the staging buffer may have only one writer.
            if not await settled(update.incoming.received, timeout_s=request.timeout_s):
                raise UpdateInProgress(
                    f"the dropped update {_named(update.request)} still waits for {update.incoming.unblock}"
                )
            self._check_transport(request)  # check again, because the group may have been left during the wait
        sink = self._sink(wire)
        if request.transport is Transport.PULL and self._pull is not None:
            incoming = IncomingUpdate.by_pull(request, sink, self._pull)
        else:
            incoming = IncomingUpdate.by_broadcast(request, sink, self._member)
        self._update = _Update(incoming)
        return self._answer(UpdateStatus.PREPARED)

    def _take_over(self, request: WeightUpdateRequest) -> None:
        """Drop an earlier epoch's update. Raises `StaleVersion` for a past epoch, `InvalidRequest` if too high."""
        if request.epoch < self._epoch:
            raise StaleVersion(
                f"epoch {self._epoch} has taken over from the epoch of {_named(request)}; its trainer must stop. If no "
                "other trainer was started, this engine received a wrong epoch; restart it",
                param="epoch",
                known={"epoch": self._epoch},
            )
        serving, version = self._target.serving()
        known = max(self._epoch, serving)
        if request.epoch > known + MOST_EPOCH_STEP or request.version > version + MOST_VERSION_STEP:
            raise InvalidRequest(
                f"epoch and version must be at most {MOST_EPOCH_STEP} and {MOST_VERSION_STEP} above {known}.{version}, "
                f"which is known here, got {_named(request)}; if they are correct, restart the engine",
                param="version",
            )
        if self._update is not None and self._update.request.epoch < request.epoch:
            self._drop()
        self._epoch = request.epoch

    def _checked_layout(self, request: WeightUpdateRequest) -> WeightLayout:
        ours, sent = self._target.layout, request.layout
        if sent is None:
            known = {layout.layout_id: layout for layout in (ours, self._wire) if layout is not None}
            if request.layout_id not in known:
                raise NotPrepared(
                    f"layout_id {request.layout_id!r} is not known here; send the full layout", param="layout_id"
                )
            wire = known[request.layout_id]
        else:
            difference = ours.difference(sent, converted=converted_by(ours))
            if difference is not None:
                raise LayoutMismatch(f"the update does not fit the model: {difference}", param="layout")
            self._wire = wire = sent
        if wire.num_bytes // request.bucket_bytes > MAX_PIECES:
            least = -(-wire.num_bytes // MAX_PIECES)
            raise InvalidRequest(f"bucket_bytes must be at least {least} for these weights, got {request.bucket_bytes}")
        return wire

    def _sink(self, wire: WeightLayout) -> WeightSink:
        target, ours = self._target, self._target.layout
        if wire.layout_id == ours.layout_id:
            return WeightSink(ours, target.staging(), target.finish_staging)
        if self._unconverted is None or len(self._unconverted) != wire.num_bytes:
            self._unconverted = self._endpoints.buffer(target.staging(), wire.num_bytes)
        sent = self._unconverted

        def finish() -> None:
            from pipelinerl.weights.torch_transfer import convert

            convert(sent, wire, into=target.staging(), layout=ours)
            target.finish_staging()

        return WeightSink(wire, sent, finish)

    def _check_transport(self, request: WeightUpdateRequest) -> None:
        if request.transport is not Transport.PULL:
            self._member.check(group=request.group, generation=request.generation)
        elif self._pull is None:
            raise InvalidRequest("transport pull is not offered by this engine; use broadcast", param="transport")

    def _serves(self, request: WeightUpdateRequest) -> bool:
        """Return True if this version serves, and the engine is not dirty. Raises `StaleVersion` if it is outdated."""
        serving, wanted = self._target.serving(), (request.epoch, request.version)
        if wanted < serving:
            raise StaleVersion(
                f"epoch and version must come after {serving[0]}.{serving[1]}, which serves, got {_named(request)}; if "
                "no trainer has published those, restart the engine",
                param="version",
                known={"epoch": serving[0], "version": serving[1]},
            )
        return wanted == serving and self.dirty is None

    async def _commit(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        update = self._update
        if update is None or update.key != (request.epoch, request.version) or update.dropped:
            if not self._serves(request):
                raise NotPrepared(f"update {_named(request)} was not prepared here, or has failed or was aborted")
            if self.digest is not None and self.digest != request.digest:
                raise DigestMismatch(
                    f"{_named(request)} is served already with digest {self.digest}, the commit says {request.digest}",
                    param="digest",
                )
            return self._answer(UpdateStatus.ALREADY_SERVING)
        if update.stage is _Stage.RECEIVING:
            received = await self._bytes(update, request.timeout_s)
            if update.dropped:
                raise NotPrepared(f"update {_named(request)} was aborted while it was being committed")
            if received.digest != request.digest:
                self._fail(update)
                raise DigestMismatch(
                    f"update {_named(request)}: digest must be {request.digest}, received {received.digest}; the old "
                    "weights still serve",
                    param="digest",
                )
        if update.committing is None:
            update.stage = _Stage.COMMITTING
            chosen = request if "on_update" in request.model_fields_set else update.request
            update.committing = asyncio.create_task(self._swap(update, chosen.on_update))
        await asyncio.wait({update.committing}, timeout=request.timeout_s)
        if not update.committing.done():
            raise DeadlineExceeded(
                f"the swap to {_named(request)} with on_update {update.request.on_update} has not happened within "
                f"{request.timeout_s:g} s but still will; commit again"
            )
        return self._answer(UpdateStatus.COMMITTED, pause_s=update.committing.result())

    async def _bytes(self, update: _Update, timeout_s: float) -> Received:
        incoming = update.incoming
        if not await settled(incoming.received, timeout_s=timeout_s):
            raise DeadlineExceeded(
                f"update {_named(update.request)}: {incoming.sender} has not sent everything within {timeout_s:g} s, "
                f"received so far: {incoming.progress}"
            )
        error = incoming.received.exception()
        if error is None:
            return incoming.received.result()
        if update.stage is _Stage.RECEIVING:
            self._fail(update)
            incoming.give_up()
        raise as_contract(error)

    async def _swap(self, update: _Update, on_update: OnUpdate) -> float:
        received, request, known = update.incoming.received.result(), update.request, False
        try:
            pause_s = await self._target.commit(version=request.version, epoch=request.epoch, on_update=on_update)
            known = True
        except ContractError:
            known = True
            self._fail(update)
            raise
        finally:
            if not known:
                self._fail(update)
                self.dirty = f"the swap to {_named(request)} failed midway; publish a full update to repair it"
                raise Dirty(self.dirty)
        self._update, self.dirty, self.digest = None, None, received.digest
        self.totals.updates += 1
        self.totals.last_pause_s, self.totals.last_receive_s = pause_s, received.seconds
        return pause_s

    def _fail(self, update: _Update) -> None:
        update.stage = _Stage.DROPPED
        self.totals.failures += 1

    def _answer(self, status: UpdateStatus, *, pause_s: float = 0.0) -> WeightUpdateResponse:
        epoch, version = self._target.serving()
        committed = status is UpdateStatus.COMMITTED
        return WeightUpdateResponse(
            status=status,
            version=version,
            epoch=epoch,
            digest=self.digest,
            pause_s=pause_s,
            receive_s=self.totals.last_receive_s if committed else 0.0,
            num_bytes=self._target.layout.num_bytes if committed else 0,
        )


def _named(request: WeightUpdateRequest) -> str:
    return f"{request.epoch}.{request.version}"
