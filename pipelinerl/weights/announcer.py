"""`Announcer`: tells many engines at once that there is a version to pull, without a request to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inference_contract.weights import WeightUpdateRequest, WeightUpdateResponse
from pipelinerl.weights.fan_out import Failure


class Announcer(Protocol):
    """Whom it reaches, and who says nothing, is told by what `tell` returns; the others are asked one by one."""

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """Announce the version that `prepare` is about, and wait for the engines that follow announcements.

        Args:
            prepare: by the transport `pull`, with the layout's id alone; each engine begins with another of its
                sources.
            engines: base URLs of those who are to serve it.
            left_out: of those who follow announcements, too, and are not to.
            deadline: in monotonic seconds.

        Returns:
            By base URL, what each of them serves now, or why it does not. Who has said nothing is not among them.
        """
        ...
