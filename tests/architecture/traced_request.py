"""Measure which files a chat request runs through, from the HTTP handler to its tokens and back.

    python -m tests.architecture.count request

A torch engine of two layers answers one request over its ASGI application. A profile function on the event loop's
thread and on the engine's thread notes the file of every product function that is called meanwhile.
"""

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import final

import httpx

from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import from_options
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, char_tokenizer, random_decoder
from trainer_contract.types import Device

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("inference_contract", "pipelinerl", "trainer_contract")


@final
class CalledFiles:
    """Counts calls of product functions by file while `on` is true, on threads started in its `with` block."""

    def __init__(self):
        self.calls = Counter[str]()
        self.on = False
        self._prefixes = tuple(f"{ROOT / package}/" for package in PRODUCT)

    def __enter__(self):
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(self._prefixes) and code.co_name != "<module>":
            self.calls[str(Path(code.co_filename).relative_to(ROOT))] += 1


def files_of_a_request():
    """Return the sorted paths of the files that run for one completion of eight tokens."""
    with tempfile.TemporaryDirectory() as folder, CalledFiles() as called:
        asyncio.run(_ask(Path(folder), called))
        return sorted(called.calls)


async def _ask(folder, called):
    tokenizer = char_tokenizer()
    random_decoder(
        DecoderShape(hidden=16, layers=2, heads=2, intermediate=16, vocab=len(tokenizer), max_positions=64)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engine = from_options(
        EngineOptions(
            model_path=folder, model_id="m", slots=4, max_waiting=8, context_length=64, device=Device.CPU, threads=1
        )
    )
    app = create_app(engine, token=None)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "logprobs": True}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
    ):
        for called.on in (False, True):  # the first request only warms up libraries
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        called.on = False
