"""An engine of this project in a process of its own, without a controller."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from pipelinerl.system.machine import free_ports
from tests.fakes.live_run import CLI
from tests.patience import PATIENCE_S


@contextmanager
def standalone_engine(model: Path, folder: Path, *changes: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve the model; yield the address and the process. `changes` are those of `--set`."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    words = [*CLI, "engine", "--controller-url", "", "--no-token", "--port", str(port), "--model", str(model)]
    words += ["--run-dir", str(folder / "run"), *(word for change in changes for word in ("--set", change))]
    with (folder / "engine.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _answers(url):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "engine.log").read_text()
                time.sleep(0.1)
            yield url, process
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False
