"""Launch plans for several hosts equal the golden files (outputs of `pipelinerl plan`); impossible hosts are rejected.

`PIPELINERL_WRITE_GOLDEN=1 python -m pytest tests/launch/cluster/test_plan_of_hosts.py` rewrites the golden files; read
the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

import pytest

from launch.cluster.launchers import plan_json, plan_lines
from launch.hosts import Devices, Host, VisibleDevice, numbered_devices, read_hosts
from launch.placement import spread
from launch.plan import Launch, processes_of
from pipelinerl.errors import UserError
from tests.launch.config import config_of

GOLDEN = Path(__file__).parents[1] / "golden" / "hosts"
RUN = Path("/runs/x")
TWO = ("a=10.0.0.1:gpus=8", "b=10.0.0.2:gpus=8")
MESH = {"mesh": {"dp_replicate": 1, "dp_shard": 4}}

CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "one_host": ({}, ("a=10.0.0.1:gpus=2",)),
    "two_hosts": ({"engine": {"count": 3}, "actor": {"count": 3}}, TWO),
    "without_gpus": ({"engine": {"type": "bigram", "count": 3}, "trainer": {"type": "bigram"}}, ("a=10.0.0.1", "b")),
    "trainer_elsewhere": (
        {"engine": {"type": "vllm", "devices": 2, "count": 2}, "trainer": {"options": MESH}},
        ("head:gpus=0,roles=actor", "t:gpus=4,roles=trainer", "e:gpus=4,roles=engine+actor"),
    ),
    "trainer_over_two": ({"trainer": {"options": MESH}}, ("a=10.0.0.1:gpus=3", "b=10.0.0.2:gpus=2")),
    "pull": ({"weights": {"transport": "pull"}, "parameter_server": {"replicas": 2}}, TWO),
}


def _launch(config, hosts):
    return Launch.on(hosts, config, run_dir=RUN, ports=count(20000), python="py")


def _planned(words, **sections):
    config = config_of(**sections)
    return _launch(config, read_hosts(config, words, count=None, gpus=None))


@pytest.mark.parametrize("case", CASES)
def test_launch_plans_for_several_hosts_match_the_golden_files(case):
    sections, words = CASES[case]
    shown = "\n".join(plan_lines(_planned(words, **sections))) + "\n"
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("PIPELINERL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown)
    assert shown == path.read_text()


def test_each_process_in_a_launch_plan_listens_at_the_address_of_its_host():
    launch = _planned(TWO, engine={"count": 3})
    plan = processes_of(launch)
    shares = [plan.of_host("a"), plan.of_host("b")]
    assert sorted(spec.name for share in shares for spec in share.specs) == sorted(spec.name for spec in plan.specs)
    engine = next(spec for spec in plan.specs if spec.name == "engine-0")
    words = dict(zip(engine.argv[5::2], engine.argv[6::2], strict=True))
    assert words["--host"] == "10.0.0.2" and words["--controller-url"] == "http://10.0.0.1:20000"
    assert words["--redis-url"] == "redis://10.0.0.1:20004/0"
    assert engine.health == "http://10.0.0.2:20001/health"
    assert shares[1].elsewhere["controller"] == "http://10.0.0.1:20000/health"
    assert not any("127.0.0.1" in " ".join(spec.argv) for spec in plan.specs)


def test_launch_plan_names_the_files_that_hold_secrets_but_contains_no_secret():
    shown = json.dumps(plan_json(_planned(TWO)))
    assert json.loads(shown)["token_file"] == "/runs/x/tokens.json"
    config = config_of(streams={"redis_url": "redis://:s3cret@db:6379/3"})
    launch = _launch(config, read_hosts(config, TWO, count=None, gpus=None))
    assert "s3cret" not in json.dumps(plan_json(launch)) + "".join(plan_lines(launch))


def test_ranks_of_one_trainer_form_one_process_group_with_one_gpu_for_each_rank():
    sections, words = CASES["trainer_over_two"]
    processes = plan_json(_planned(words, **sections))["processes"]
    ranks = {each["rank"]: each for each in processes if each["rank"] is not None}
    assert [(ranks[rank]["host"], ranks[rank]["devices"]) for rank in range(4)] == [
        ("a", [0]), ("a", [1]), ("a", [2]), ("b", [0]),
    ]  # fmt: skip
    assert {each["group"] for each in ranks.values()} == {"trainer"}
    assert [ranks[rank]["env"]["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["0", "1", "2", "0"]


def test_hosts_can_be_given_as_a_number_instead_of_by_name():
    hosts = read_hosts(config_of(), [], count=2, gpus=4)
    assert [(host.name, host.address, len(host.devices)) for host in hosts] == [
        ("host-0", "host-0", 4), ("host-1", "host-1", 4),
    ]  # fmt: skip
    with pytest.raises(UserError, match="not both"):
        read_hosts(config_of(), ["a"], count=2, gpus=4)


def test_host_uses_the_gpus_that_it_detects_and_is_rejected_if_they_are_too_few():
    placement = spread(config_of(), [Host(name=n, address=n, devices=numbered_devices(1)) for n in "ab"])
    own = placement.knowing("b", Devices((VisibleDevice("GPU-1"), VisibleDevice("GPU-2")), chosen_by_user=True))
    assert own.host("b").devices == Devices((VisibleDevice("GPU-1"),), chosen_by_user=True)
    assert own.host("a") == placement.host("a")
    with pytest.raises(UserError, match="host b 1 GPU, and it has none; pass --node b:gpus=0"):
        placement.knowing("b", Devices())
    with pytest.raises(UserError, match="has no host 'c'; its hosts are a, b"):
        placement.host("c")
