"""Steps and groups read from the records of a run.

A trainer process has a number, its epoch, which grows at each restart. A step's lineage lists the epochs before it.
"""

import asyncio

from pipelinerl.config.recipe import load
from pipelinerl.messages import ROLLOUTS
from pipelinerl.observability.events import EventLog
from pipelinerl.plugins.replay.recorded_run import recorded_groups, recorded_steps
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.system.machine import free_ports
from pipelinerl.training.rollouts.admission import Lineage
from tests.fakes.rollouts import group


def test_recorded_step_lists_no_rollout_groups_if_no_trainer_ready_event_precedes_it(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("step", step=1, model_version=1, orders=[1], elapsed_s=1.0)
    assert recorded_steps(tmp_path)[1].orders == (), "groups of other trainers may have the same order"


def test_groups_of_a_killed_run_are_read_and_undecodable_records_are_skipped(tmp_path):
    """The run directory still names the address of the killed controller, which does not answer."""
    (port,) = free_ports(1)
    (tmp_path / "controller.json").write_text(f'{{"url": "http://127.0.0.1:{port}", "token": null}}')
    given = group(3)

    async def fill(url):
        stream = await open_stream(url, namespace="tiny")
        await stream.append(ROLLOUTS + "actor-0", [b"rubbish", encode_group(given)])
        await stream.close()

    with EmbeddedRedis(tmp_path / "redis") as server:
        asyncio.run(fill(server.url))
    groups = recorded_groups(load("tiny"), tmp_path)
    assert [each.index for each in groups[given.index]] == [given.index]


def test_lineage_of_a_recorded_step_lists_all_earlier_trainer_processes(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("run_started", run="ended", elapsed_s=0.0)
        for epoch, began_at in ((1, 0), (2, 1), (3, 2)):
            events.write("trainer_ready", epoch=epoch, model_version=began_at, elapsed_s=0.0)
            for step in (began_at + 1, began_at + 2):
                events.write("step", step=step, model_version=step, orders=[step], elapsed_s=1.0)
    lineages = {version: step.lineage for version, step in recorded_steps(tmp_path).items()}
    assert lineages == {
        1: Lineage(1, 0),
        2: Lineage(2, 1, earlier=((1, 0),)),
        3: Lineage(3, 2, earlier=((1, 0), (2, 1))),
        4: Lineage(3, 2, earlier=((1, 0), (2, 1))),
    }
