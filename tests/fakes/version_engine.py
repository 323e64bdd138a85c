"""Engines in which every weight equals the model version, so that each token shows which version sampled it.

Each is the real `BatchingEngine` over 24 tensors. The id of a sampled token is the smallest weight, and its log-prob is
the smallest minus the largest weight: 0, unless weights of several versions are mixed.

    python -m tests.fakes.version_engine      for each line read, forks an engine and prints its pid and port

A `Nursery` runs that process, which has imported everything, so that an engine starts immediately when it is forked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Self, final

import numpy as np

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import EarlyStep, Prefill, RowState
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.engines.http.server import create_app
from pipelinerl.system.http_service import listen, serve
from tests.fakes.engine_options import engine_options
from tests.patience import PATIENCE_S

#: The weights have more bytes than the buffers of a connection, so that a suspended receiver blocks the sender.
LAYOUT: Final = WeightLayout(
    parameters=tuple(ParameterSpec(name=f"p{row:02}", shape=(2**16,), dtype=DType.FLOAT32) for row in range(24))
)
BUCKET_BYTES: Final = 2**18
#: Seconds per decode step, so long that many engines can share a processor.
STEP_S: Final = 0.01
PROMPT: Final = [1, 2, 3]


def weights(version: int, *, before: Callable[[int], None] = lambda _: None) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Return a function that gathers all weights of a version; it calls `before(row)` before each parameter."""

    def source() -> Iterator[tuple[str, Any]]:
        for row, parameter in enumerate(LAYOUT.parameters):
            before(row)
            yield parameter.name, np.full(parameter.shape, version, np.float32)

    return source


@final
class VersionRunner:
    """A `ModelRunner` over weights that all equal the model version."""

    slots = 64
    context_length = 256
    vocab_size = 2**20
    layout = LAYOUT
    cache_bytes = 0
    route_log = None
    scorer = None
    top_logprobs: ClassVar[dict[int, TopTokens]] = {}

    def __init__(self) -> None:
        self._current = np.zeros(LAYOUT.num_bytes, np.uint8)
        self._staged = np.zeros(LAYOUT.num_bytes, np.uint8)
        self.early_step = EarlyStep(self.slots, is_used=False)

    room = None

    def reserve(self, num_rows: int) -> bool:
        return True

    def release(self, rows: Sequence[int]) -> None:
        pass

    def clear(self, rows: Sequence[int]) -> None:
        pass

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        pass

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        pass

    def place(self, states: Sequence[RowState]) -> None:
        pass

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        time.sleep(STEP_S)
        values = self._current.view(np.float32)
        low, high = float(values.min()), float(values.max())
        return [int(low)] * num_rows, [low - high] * num_rows

    def staging(self) -> Any:
        return self._staged

    def finish_staging(self) -> None:
        pass

    def swap(self) -> None:
        self._current, self._staged = self._staged, self._current


@final
class _NoText:
    """A `Tokenizer` for a model without text, whose prompts are token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode_chat(self, messages: object, template_kwargs: object = (), tools: object = ()) -> list[int]:
        return PROMPT

    def encode_prompt(self, text: str) -> list[int]:
        return PROMPT

    def decode(self, token_ids: object) -> str:
        return ""

    def detokenizer(self) -> Self:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def application(*, token: str | None = None) -> Any:
    """Return the ASGI application of a new engine."""
    options = engine_options(model_id="versions")
    return create_app(BatchingEngine(options, load=VersionRunner, tokenizer=_NoText()), token=token)


@final
class Nursery:
    """Engines in separate processes, killed at the end of the `with` block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.version_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pids: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self.pids):
            self.kill(url)
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def born(self) -> str:
        """Start an engine; return its base URL once it listens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        pid, port = self._process.stdout.readline().split()
        url = f"http://127.0.0.1:{port}"
        self.pids[url] = int(pid)
        return url

    def kill(self, url: str) -> None:
        os.kill(self.pids.pop(url), signal.SIGKILL)

    def freeze(self, url: str) -> None:
        os.kill(self.pids[url], signal.SIGSTOP)

    def thaw(self, url: str) -> None:
        os.kill(self.pids[url], signal.SIGCONT)


def _engine() -> None:
    with listen("127.0.0.1", 0) as listener:
        os.write(1, f"{os.getpid()} {listener.getsockname()[1]}\n".encode())
        serve(application(), listener)


def _nursery() -> None:
    import pipelinerl.weights.broadcast.collective  # import torch once, before the engines are forked

    assert pipelinerl.weights.broadcast.collective.dist.is_available()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ignore SIGCHLD, so that no dead child becomes a zombie
    for _ in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            _engine()
            os._exit(0)


if __name__ == "__main__":
    _nursery()
