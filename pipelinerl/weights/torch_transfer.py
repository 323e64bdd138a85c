"""Transfer of torch tensors: `convert` changes dtypes, `OverlappedDigest` hashes bytes while the next are sent.

Bytes on a GPU are copied to the host once, piece by piece, into two pinned buffers in turn, on a stream that waits
neither for training nor for decoding. Bytes on the host are hashed without a copy. A host with few cores hashes each
piece before sending it, since a hashing thread would compete with the sender, and its cache would not hold the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor

from inference_contract.errors import OutOfRange
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.system.background import in_background_soon
from pipelinerl.weights.broadcast.collective import shared_tensor
from pipelinerl.weights.layout import WeightDigest

#: A function that waits until a copy to the host is complete, and then returns the copied bytes.
Landed = Callable[[], Tensor]


#: Minimum number of cores for hashing on a separate thread; the trainer or decode loop, gloo and the sender need the
#: rest.
_CORES_TO_OVERLAP: Final = 5


class TransferStream(Protocol):
    """The stream on which a publication gathers, copies and sends; it is the current stream in a `with` block."""

    @property
    def overlaps(self) -> bool:
        """True if bytes are hashed on a separate thread while the next bytes are copied and sent."""
        ...

    def __enter__(self) -> Self:
        """Run the block's work after the work queued on the device's default stream, or queued before `mark_start`."""
        ...

    def __exit__(self, *_: object) -> None:
        """Wait until all work of the block has ended, so that the data it read may be changed."""
        ...

    def mark_start(self) -> None:
        """Let later blocks start after the work queued so far, without waiting for what is queued from now on."""
        ...

    def to_host(self, data: Tensor) -> Landed:
        """Begin to copy flat uint8 `data`; return a function that awaits it, valid for two calls."""
        ...


class HostStream:
    """Takes the place of a CUDA stream if the bytes are on the host already: nothing is copied."""

    def __init__(self, *, cores: int | None = None) -> None:
        """Overlap hashing and sending if there are enough `cores`; None counts those that this process may use."""
        self.overlaps = (len(os.sched_getaffinity(0)) if cores is None else cores) >= _CORES_TO_OVERLAP

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def mark_start(self) -> None: ...

    def to_host(self, data: Tensor) -> Landed:
        return lambda: data


class CudaStream:
    """Two streams of a GPU: the first gathers and sends; meanwhile the second copies to pinned memory."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main: Any = torch.cuda.Stream(device)
        self._copies: Any = torch.cuda.Stream(device)
        self._pinned: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._start: Any = None
        self._current = ExitStack()

    def __enter__(self) -> Self:
        # A new thread's device is GPU 0, where leaving the stream would otherwise create a context.
        self._current.enter_context(torch.cuda.device(self._device))
        self._main.wait_event(self._start or torch.cuda.current_stream().record_event())
        self._current.enter_context(torch.cuda.stream(self._main))
        return self

    def __exit__(self, *_: object) -> None:
        self._current.close()
        self._main.synchronize()
        self._copies.synchronize()

    def mark_start(self) -> None:
        self._start = torch.cuda.current_stream(self._device).record_event()

    def to_host(self, data: Tensor) -> Landed:
        pinned = self._pinned.pop(0)
        if pinned.numel() < data.numel():
            pinned = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        self._pinned.append(pinned)
        self._copies.wait_event(self._main.record_event())
        part = pinned[: data.numel()]
        with torch.cuda.stream(self._copies):
            part.copy_(data, non_blocking=True)
            copied = self._copies.record_event()

        def landed() -> Tensor:
            copied.synchronize()
            return part

        return landed


def stream_for(device: torch.device) -> TransferStream:
    """Return the stream for a publication whose weights are on `device`: a `CudaStream` or a `HostStream`."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


class OverlappedDigest:
    """A `WeightDigest` that hashes on a thread if that is faster. One thread may call `append`; its bytes may be
    overwritten after the next `append`, or after `settle`.
    """

    def __init__(self, stream: TransferStream) -> None:
        self._stream = stream
        self._digest = WeightDigest()
        self._last: Future[None] | None = None

    def append(self, data: Tensor) -> Landed:
        """Begin to hash flat uint8 `data`; return a function that waits for the bytes on the host and returns them."""
        landed = self._stream.to_host(data)
        self.settle()
        if not self._stream.overlaps:
            self._digest.update(landed().numpy())
            return landed
        self._last = in_background_soon("digest", lambda: self._digest.update(landed().numpy()))
        return landed

    def settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def hexdigest(self) -> str:
        self.settle()
        return self._digest.hexdigest()


#: Number of elements converted per operation, so that temporaries stay small compared to the model.
_BLOCK: Final = 1 << 22


def convert(sent: Any, wire: WeightLayout, *, into: Any, layout: WeightLayout) -> None:
    """Convert `sent` u8 [wire.num_bytes] to the dtypes of `layout`, into `into` u8 [layout.num_bytes].

    Both layouts have the same parameters in order. Both buffers are numpy, or torch on one device. Raises OutOfRange if
    a finite value would become an infinity.
    """
    source, target = shared_tensor(sent), shared_tensor(into)
    for (sent_as, values), (kept, place) in zip(_parts(source, wire), _parts(target, layout), strict=True):
        if sent_as.dtype is kept.dtype:
            place.copy_(values)
            continue
        old, new = sent_as.dtype.itemsize, kept.dtype.itemsize
        for start in range(0, values.numel() // old, _BLOCK):
            part = values[start * old : (start + _BLOCK) * old]
            if part.storage_offset() % old:  # mixed dtypes in the layout leave parameters unaligned
                part = part.clone()
            block = part.view(getattr(torch, sent_as.dtype.value))
            made = block.to(getattr(torch, kept.dtype.value))
            if kept.dtype is DType.FLOAT16 and bool((made.isinf() & block.isfinite()).any()):
                largest = block[block.isfinite()].abs().max().item()
                raise OutOfRange(
                    f"parameter {kept.name!r} holds {largest:.4g}, beyond the 65504 of float16, in which this engine "
                    "keeps its weights; set engine.dtype=bfloat16 or float32"
                )
            place[start * new : start * new + made.numel() * new].copy_(made.view(torch.uint8))


def _parts(buffer: Tensor, layout: WeightLayout) -> Iterator[tuple[ParameterSpec, Tensor]]:
    for spec, end in zip(layout.parameters, layout.ends, strict=True):
        yield spec, buffer[end - spec.num_bytes : end]
