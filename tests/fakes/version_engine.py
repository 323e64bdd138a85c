"""Engines in which every weight equals the model version, so that each token shows which version sampled it.

Each is the real `BatchingEngine` over 24 tensors. The id of a sampled token is the smallest weight, and its log-prob is
the smallest minus the largest weight: 0, unless weights of several versions are mixed.

    python -m tests.fakes.version_engine      for each line read, forks an engine and prints its pid and port

A `Nursery` runs that process, which has imported everything, so that an engine starts immediately when it is forked.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Final, final

import numpy as np

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.http.server import create_app
from pipelinerl.plugins.bigram.engine import BigramRunner
from pipelinerl.plugins.bigram.model import BigramModel
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


def weights(version, *, before=lambda _: None):
    """Return a function that gathers all weights of a version; it calls `before(row)` before each parameter."""

    def source():
        for row, parameter in enumerate(LAYOUT.parameters):
            before(row)
            yield parameter.name, np.full(parameter.shape, version, np.float32)

    return source


@final
class VersionRunner(BigramRunner):
    """A `ModelRunner` over weights that all equal the model version."""

    context_length = 256

    def __init__(self):
        super().__init__(BigramModel.random(2, seed=0), rows=64, context_length=self.context_length)
        self.vocab_size, self.layout, self.scorer = 2**20, LAYOUT, None
        self._current, self._staged = (np.zeros(LAYOUT.num_bytes, np.uint8) for _ in range(2))

    def decode(self, num_rows):
        time.sleep(STEP_S)
        values = self._current.view(np.float32)
        low, high = float(values.min()), float(values.max())
        return [int(low)] * num_rows, [low - high] * num_rows


@final
class _NoText:
    """A `Tokenizer` for a model without text, whose prompts are token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode_chat(self, messages, template_kwargs=(), tools=()):
        return PROMPT

    def encode_prompt(self, text):
        return PROMPT

    def decode(self, token_ids):
        return ""

    def detokenizer(self):
        return self

    def push(self, token_id):
        return ""

    def flush(self):
        return ""


def application(*, token=None):
    options = engine_options(model_id="versions")
    return create_app(BatchingEngine(options, load=VersionRunner, tokenizer=_NoText()), token=token)


@final
class Nursery:
    """Engines in separate processes, killed at the end of the `with` block."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.version_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pids: dict[str, int] = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for url in list(self.pids):
            self.kill(url)
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def born(self):
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        pid, port = self._process.stdout.readline().split()
        url = f"http://127.0.0.1:{port}"
        self.pids[url] = int(pid)
        return url

    def kill(self, url):
        os.kill(self.pids.pop(url), signal.SIGKILL)

    def freeze(self, url):
        os.kill(self.pids[url], signal.SIGSTOP)

    def thaw(self, url):
        os.kill(self.pids[url], signal.SIGCONT)


def _engine():
    with listen("127.0.0.1", 0) as listener:
        os.write(1, f"{os.getpid()} {listener.getsockname()[1]}\n".encode())
        serve(application(), listener)


def _nursery():
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
