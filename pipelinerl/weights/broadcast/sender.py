"""`WeightSender` and `packed`: they pass once over the trainer's parameters and copy them into memory, bucket by
bucket.

`WeightSender` hashes each bucket, and broadcasts it if there is a group. It holds one or two buckets, never the model.
On a GPU it uses its own CUDA stream.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from inference_contract.weights import WeightLayout, cut
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.weights.broadcast.collective import Collective
from pipelinerl.weights.layout import describe_bucket, parameters_in
from pipelinerl.weights.publisher import WeightSource
from pipelinerl.weights.torch_transfer import OverlappedDigest, TransferStream, stream_for
from trainer_contract.host_weights import bytes_of

#: Two buckets are staged (one is filled while the other is hashed), unless a bucket has more than this many times the
#: usual size.
_LARGEST_OF_TWO: Final = 2


class WeightSender:
    """Sends the weights once, on one thread; after a failure, `broke_in_group` is True if another rank caused it."""

    def __init__(
        self,
        layout: WeightLayout,
        weights: WeightSource,
        bucket_bytes: int,
        *,
        streams: Callable[[torch.device], TransferStream] = stream_for,
    ) -> None:
        self._layout = layout
        self._weights = weights
        self._bounds = layout.buckets(bucket_bytes)
        self._bucket_bytes = bucket_bytes
        self._streams = streams
        self.broke_in_group = False
        self.longest_s = 0.0
        """The longest time in seconds between two pieces, or from the start to the first, until all ranks took it."""

    def send(
        self, group: Collective | None, *, deadline: float, silence_s: float = math.inf, pieces_key: str = ""
    ) -> str:
        """Send the weights and return their digest; without a group, only hash.

        `pieces_key` is the key in the group's store under which the sender first announces how it cuts the bytes into
        pieces; receivers compare this with their own cuts.

        Raises UpdateError if the trainer deviates from its layout or a rank left; DeadlineError if a rank takes no
        piece for `silence_s`, or has not taken all pieces by `deadline` (monotonic seconds).
        """
        if group is not None and pieces_key:
            self._announce(group, pieces_key)
        gathered = iter(self._weights())
        first = list(itertools.islice(gathered, 1))
        # Buckets are filled on the group's device if it is a GPU, else where the weights are.
        array = first[0][1] if first else None
        device = array.device if isinstance(array, torch.Tensor) else torch.device("cpu")
        if group is not None and group.device.type != "cpu":
            device = group.device
        largest = max(end - start for start, end in self._bounds)
        with self._streams(device) as stream:
            digest = OverlappedDigest(stream)
            two = stream.overlaps and largest <= _LARGEST_OF_TWO * self._bucket_bytes
            made = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(1 + two)]
            slots = itertools.cycle(made)
            last: torch.Tensor | None = None
            taken_at = time.monotonic()

            def room(start: int, end: int) -> torch.Tensor:
                nonlocal last
                before, last = last, next(slots)
                if last is before:
                    digest.settle()
                return last[: end - start]

            # Pop the first parameter from the list, so that its array is freed as early as those of other parameters.
            weights = lambda: itertools.chain((first.pop() for _ in range(len(first))), gathered)  # noqa: E731
            for bucket, filled in enumerate(packed(self._layout, weights, self._bounds, room)):
                for start, end in cut(0, filled.numel(), self._bucket_bytes):
                    piece = filled[start:end]
                    landed = digest.append(piece)
                    if group is not None:
                        piece = piece if piece.device.type == group.device.type else landed()
                        patience = min(deadline, time.monotonic() + silence_s)
                        self._broadcast(group, piece, bucket, deadline=patience)
                        before, taken_at = taken_at, time.monotonic()
                        self.longest_s = max(self.longest_s, taken_at - before)
            return digest.hexdigest()

    def _announce(self, group: Collective, key: str) -> None:
        try:
            group.announce(key, self._layout.agreement(self._bucket_bytes))
        except UpdateError:
            self.broke_in_group = True
            raise

    def _broadcast(self, group: Collective, piece: torch.Tensor, bucket: int, *, deadline: float) -> None:
        try:
            group.broadcast(piece, deadline=deadline)
        except (UpdateError, DeadlineError) as error:
            self.broke_in_group = True
            raise type(error)(f"{describe_bucket(self._layout, bucket, self._bounds)}: {error}") from error


def packed(
    layout: WeightLayout,
    weights: WeightSource,
    bounds: Sequence[tuple[int, int]],
    room: Callable[[int, int], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Yield the weights by `bounds`, copied into memory of `room(start, end)`. Raises UpdateError off the layout."""
    gathered = iter(weights())
    for start, end in bounds:
        filled = room(start, end)
        # Slice numpy arrays: models have over ten thousand parameters, and slicing a tensor takes several times as
        # long.
        host = filled.numpy() if filled.device.type == "cpu" else None
        for parameter, offset in parameters_in(layout, start, end):
            name: str | None
            array: Any
            name, array = next(gathered, (None, None))
            gathered_as = None if name is None else (name, tuple(array.shape), str(array.dtype).removeprefix("torch."))
            wanted = (parameter.name, parameter.shape, parameter.dtype.value)
            if gathered_as != wanted:
                raise UpdateError(
                    f"the trainer must gather {wanted} next, as its layout says, it gathered {gathered_as}"
                )
            at = slice(offset - start, offset - start + parameter.num_bytes)
            if host is not None and isinstance(array, np.ndarray):
                host[at] = bytes_of(array)
            else:
                _write(array, filled[at])
        yield filled
    extra = next(gathered, None)
    if extra is not None:
        raise UpdateError(f"the trainer gathered {extra[0]!r} after the last parameter of its layout")


def _write(array: Any, into: torch.Tensor) -> None:
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        host = bytes_of(array)  # Convert first: numpy has bfloat16 only through an extension, which torch rejects.
        if into.device.type == "cpu":
            into.numpy()[:] = host
        else:
            into.copy_(torch.from_numpy(host.copy()))
        return
    tensor = array if isinstance(array, torch.Tensor) else from_dlpack(array)
    if tensor.is_cuda:  # the tensor's memory must not be reused before this stream has read it
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    into.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
