"""A live run whose trainer announces new weights on the stream instead of sending requests to engines."""

import asyncio

import pytest

from inference_contract.weights import WeightUpdateResponse
from pipelinerl.messages import TAKEN, decode_taken
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import START
from tests.fakes.live_run import launched, light_run


async def taken(run):
    """Return the engines' recent reports of loaded weights."""
    argv = run.role("trainer").cmdline()
    url = argv[argv.index("--redis-url") + 1]
    password = (run.directory / "redis" / "password").read_text()
    stream = await open_stream(url.replace("redis://", f"redis://:{password}@"), namespace=run.directory.name)
    try:
        return [decode_taken(entry.payload) for entry in await stream.read({TAKEN: START}, count=1000, block_s=0)]
    finally:
        await stream.close()


@pytest.mark.slow
def test_every_engine_pulls_the_weight_versions_that_the_trainer_announces_on_the_stream(tmp_path):
    announced = ("weights.transport=pull", "weights.announce=stream", "engine.count=2")
    with launched(light_run(tmp_path / "run", *announced), tmp_path / "run") as run:
        run.until_step(6)
        reports = asyncio.run(taken(run))
        assert run.end() == 0, run.story()
        answers = [WeightUpdateResponse.model_validate_json(each.answer) for each in reports if each.answer]
        assert len({each.url for each in reports if each.answer}) == 2, "both follow"
        assert answers and not [each for each in reports if each.error], reports
        assert not [event["failed"] for event in run.events("publish") if event["failed"]]
        assert "have not reported; sending them requests" not in run.story() + run.output
