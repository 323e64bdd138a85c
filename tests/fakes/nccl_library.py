"""`NcclLibrary`: a fake, without a GPU, of the part of `torch.distributed` that NCCL groups use.

`verify` checks that each name of the fake exists in torch's base classes, or in the stubs of its CUDA build.
"""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path
from typing import Any, final

import torch.distributed
from torch._C import _distributed_c10d as published


@final
class NcclLibrary:
    """Stands in for `torch.distributed`; the process group that it creates is kept as `group`."""

    BroadcastOptions = torch.distributed.BroadcastOptions

    def __init__(self, work: Any, *, connects: bool = True) -> None:
        """Let every broadcast return `work`. If `connects` is false, connecting blocks until the group is aborted."""
        library = self
        self.group: Any = None

        @final
        class ProcessGroupNCCL:
            class Options:
                def __init__(self) -> None:
                    self.config = NCCLConfig()
                    self._timeout: Any = None

            def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
                self.variables = dict(os.environ)
                self.blocking = options.config.blocking
                self.aborted = threading.Event()
                library.group = self

            def eager_connect_single_device(self, device: torch.device) -> None:
                if not connects:
                    self.aborted.wait()
                    raise RuntimeError("NCCL communicator was aborted on rank 0")

            def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
                return work

            def abort(self) -> None:
                self.aborted.set()

        class NCCLConfig:
            blocking = -(2**31)

        self.ProcessGroupNCCL = ProcessGroupNCCL
        verify(ProcessGroupNCCL, NCCLConfig)


@final
class FailedWork:
    """The handle of a failed broadcast. Like NCCL's, it counts as completed, and `wait` raises the error."""

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Any:
        raise TypeError("Unable to convert function return value to a Python type!")  # as torch 2.11 does

    def wait(self) -> bool:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")


def verify(group: type, config: type) -> None:
    """Raise `AssertionError` if the fake has a method, a field or a parameter that torch does not."""
    stub = Path(str(torch.__path__[0])) / "_C" / "_distributed_c10d.pyi"
    classes = {node.name: node for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.ClassDef)}
    names = {name for name in vars(group) if not name.startswith("_")}
    assert names <= {"Options"} | set(dir(published.Backend)), names
    assert names - {"Options"} <= {*dir(published.Backend)}
    fields = {node.target.id for node in classes["NCCLConfig"].body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert "blocking" in fields and hasattr(config, "blocking")
    (made,) = (
        node
        for node in classes["ProcessGroupNCCL"].body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    assert [each.arg for each in made.args.args] == ["self", "store", "rank", "size", "options"]
    assert {name for name in vars(FailedWork) if not name.startswith("_")} <= set(dir(published.Work))
