"""The engine that benchmarks start is kept busy, and stops."""

import asyncio
import os

import pytest

from benchmarks.served_engine import EngineOrder, Load, served
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from tests.patience import PATIENCE_S

SHAPE = DecoderShape(hidden=16, layers=1, heads=2, intermediate=16, vocab=64, max_positions=64)


@pytest.mark.slow
def test_engine_process_of_a_benchmark_is_kept_busy_and_stops_when_its_with_block_exits(tmp_path):
    random_decoder(SHAPE).save_pretrained(tmp_path)
    core = min(os.sched_getaffinity(0))
    order = EngineOrder(folder=tmp_path, slots=2, context=64, load=Load(samples=2, tokens=8), core=core)

    async def two_readings(url):
        async with EngineClient(state_timeout_s=PATIENCE_S) as client:
            first = second = await client.metrics(url)
            async with asyncio.timeout(PATIENCE_S):
                while second["generated_tokens_total"] <= first["generated_tokens_total"] + 20:
                    await asyncio.sleep(0.05)
                    second = await client.metrics(url)
            return [first, second]

    with served(order) as engine:
        assert os.sched_getaffinity(engine.pid) == {core}
        first, second = asyncio.run(two_readings(engine.url))
    assert second["generated_tokens_total"] > first["generated_tokens_total"]
    # Two requests of two samples each are in progress; between two steps, all four samples may be waiting.
    assert second["running_sequences"] + second["waiting_sequences"] <= 4
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)
