"""A stock vLLM server, started as users do, with options for a small machine."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from pipelinerl.plugins.external_engines.vllm.limits import BACKEND, EXTENSION
from pipelinerl.system.http_service import listen
from tests.patience import PATIENCE_S

STARTS_IN_S = 300.0

#: The options that `docs/use/vllm.md` tells users to pass.
AS_DOCUMENTED = (
    "--enable-scale-out",
    "--logprobs-mode=processed_logprobs",
    f"--worker-extension-cls={EXTENSION}",
    f'--weight-transfer-config={{"backend": "{BACKEND}"}}',
    "--scheduling-policy=priority",
    "--no-enable-chunked-prefill",  # this option is needed only on a CPU
)

_SMALL_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def serving(
    model: Path, log: Path, *options: str, context_length: int = 256, slots: int = 16, dev_mode: bool = True
) -> Iterator[str]:
    """Serve `model` with vLLM's own server and yield its base URL; kill the server at the end of the block."""
    with listen("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1"]
    argv += [f"--port={port}", "--dtype=float32", f"--max-model-len={context_length}", f"--max-num-seqs={slots}"]
    argv += ["--kv-cache-memory-bytes=67108864", "--enforce-eager", "--disable-uvicorn-access-log", *options]
    env = os.environ | _SMALL_MACHINE | {"VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _until_healthy(url, process, log)
            yield url
        finally:
            os.killpg(process.pid, 9)  # kill the whole process group, because the engine core is a separate process
            process.wait(PATIENCE_S)


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_IN_S
    while True:
        try:
            httpx.get(url + "/health", trust_env=False, timeout=5.0).raise_for_status()
            return
        except httpx.HTTPError:
            alive = process.poll() is None and time.monotonic() < deadline
            assert alive, f"the vLLM server has not started:\n{log.read_text()[-3000:]}"
            time.sleep(0.2)


def saying(url: str, section: str, facts: dict[str, Any]) -> FastAPI:
    """Return a proxy of the server at `url` that overrides settings of one configuration section by `facts`."""
    app = FastAPI()

    @app.get("/version")
    async def version() -> Any:
        return await _asked(url, "/version")

    @app.get("/server_info")
    async def server_info(config_format: str) -> Any:
        info = await _asked(url, f"/server_info?config_format={config_format}")
        info["vllm_config"][section] |= facts
        return info

    return app


async def _asked(url: str, path: str) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        return (await http.get(url + path)).raise_for_status().json()
