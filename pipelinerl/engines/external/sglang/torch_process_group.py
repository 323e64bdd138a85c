"""`lead_group`: rank 0 of a process group whose other ranks are a stock server's, which join by torch's own API."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

from inference_contract.weights import Backend
from pipelinerl.errors import DeadlineError
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous

#: Untyped, because torch's stubs omit most of the C++ API.
dist: Any = torch.distributed


def lead_group(meeting: Rendezvous, *, name: str, world_size: int, timeout_s: float) -> Collective:
    """Form the gloo group `name`; blocks until every other rank has joined at `meeting`.

    The other ranks call `init_process_group(init_method="tcp://…")` with a group name. The store prefixes must match
    those of torch's `_new_process_group_helper`.

    Raises:
        DeadlineError: the ranks have not joined within `timeout_s`.
    """
    patience = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=patience)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
        options._timeout = patience
        options._threads = 1
        made = dist.ProcessGroupGloo(store, 0, world_size, options)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise DeadlineError(
            f"the server's {world_size - 1} ranks have not joined {name} at {meeting.host}:{meeting.port}: {reason}"
        ) from error
    return Collective(made, store, backend=Backend.GLOO, name=f"group {name!r}")
