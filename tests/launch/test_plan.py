"""The launch plan, a list of the processes to start, depends only on recipe, ports and cores."""

from itertools import count
from pathlib import Path

import pytest

from launch.hosts import LOCALHOST
from launch.plan import Launch, Plan, ProcessSpec, listening, processes_of
from pipelinerl.roles.role import OnExit
from tests.launch.config import config_of

RUN = Path("/runs/x")


def _plan(config, cores=(0, 1)):
    return processes_of(Launch.on([LOCALHOST], config, run_dir=RUN, ports=count(5000), cores=cores, python="py"))


def spec_of(plan, name):
    return next(spec for spec in plan.specs if spec.name == name)


def test_launch_plan_defines_the_start_order_ports_and_exit_rules_of_processes():
    made = _plan(config_of(engine={"count": 2}, actor={"count": 2}))
    names = [spec.name for spec in made.specs]
    assert names == ["redis", "controller", "engine-0", "engine-1", "trainer", "actor-0", "actor-1"]
    ports = {spec.name: spec.argv[spec.argv.index("--port") + 1] for spec in made.specs if "--port" in spec.argv}
    assert ports == {"redis": "5003", "controller": "5000", "engine-0": "5001", "engine-1": "5002"}
    assert spec_of(made, "engine-1").health == "http://127.0.0.1:5002/health"
    assert spec_of(made, "redis").health == "redis://127.0.0.1:5003/runs/x/redis/password"
    assert [spec.name for spec in made.specs if spec.on_exit is OnExit.COMPLETE] == ["controller"]
    stops = sorted(made.specs, key=lambda spec: spec.stop_order)
    assert [spec.name.split("-")[0] for spec in stops] == [
        "actor", "actor", "trainer", "engine", "engine", "controller", "redis",
    ]  # fmt: skip


def test_verifier_services_start_and_stop_with_the_engines():
    config = config_of(verification={"services": 2})
    made = _plan(config)
    assert [spec.name for spec in made.specs][-3:] == ["verifier-0", "verifier-1", "actor-0"]
    assert len(list(listening(config))) == len(list(listening(config_of()))) + 2
    spec = spec_of(made, "verifier-1")
    assert (spec.health, spec.after, spec.on_exit) == ("http://127.0.0.1:5004/health", ("controller",), OnExit.DONE)
    assert spec.argv[4] == "verifier" and spec.stop_order > spec_of(made, "actor-0").stop_order


def test_every_process_in_a_launch_plan_is_a_pipelinerl_command_with_the_common_options():
    for spec in _plan(config_of()).specs:
        assert spec.argv[:5] == ("py", "-P", "-m", "pipelinerl.cli", spec.name.split("-")[0])
        given = dict(zip(spec.argv[5::2], spec.argv[6::2], strict=True))
        assert given["--recipe"] == "/runs/x/recipe.toml"
        assert given["--run-dir"] == "/runs/x"
        assert given["--name"] == spec.name
        assert given["--token-file"] == "/runs/x/tokens.json"
        assert given["--controller-url"] == "http://127.0.0.1:5000"
        assert given["--redis-url"] == "redis://127.0.0.1:5002/0"
        assert spec.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("sections", "threads", "spins"),
    [
        ({"staleness": {"j": 1, "k": 2}}, "1", False),
        ({"staleness": {"j": 1, "k": 2}, "launch": {"threads": 2}}, "2", True),
        ({}, "1", True),  # engines and trainer may take turns, each with all cores
    ],
)
def test_openmp_threads_spin_before_they_sleep_if_a_process_may_have_several(sections, threads, spins):
    for spec in _plan(config_of(**sections)).specs:
        assert spec.env["OMP_NUM_THREADS"] == threads
        assert ("OMP_WAIT_POLICY" in spec.env) is not spins
        assert (int(spec.env.get("GOMP_SPINCOUNT", 0)) > 0) is spins


def test_parameter_servers_start_before_the_trainer_that_gets_their_urls():
    config = config_of(weights={"transport": "pull"}, parameter_server={"replicas": 2})
    assert len(list(listening(config))) == 5
    made = _plan(config)
    names = [spec.name for spec in made.specs]
    assert names == [
        "redis", "controller", "engine-0", "parameter-server-0", "parameter-server-1", "trainer", "actor-0",
    ]  # fmt: skip
    server, trainer = spec_of(made, "parameter-server-1"), spec_of(made, "trainer")
    assert spec_of(made, "controller").argv[-2:] == trainer.argv[-2:]
    assert server.argv[4] == "parameter-server" and server.argv[-2:] == ("--port", "5004")
    assert server.health == "http://127.0.0.1:5004/health"
    assert trainer.after == ("controller", "parameter-server-0", "parameter-server-1")
    assert trainer.argv[-2:] == (
        "--set", 'parameter_server.urls=["http://127.0.0.1:5003", "http://127.0.0.1:5004"]',
    )  # fmt: skip
    order = {spec.name: spec.stop_order for spec in made.specs}
    assert order["trainer"] < order["engine-0"] < order["parameter-server-0"] < order["controller"] < order["redis"]


def test_launcher_starts_no_stream_server_if_the_recipe_names_a_running_one():
    config = config_of(streams={"redis_url": "redis://:s3cret@db:6379/3"})
    assert list(listening(config)) == ["controller", "engine-0"]
    made = _plan(config)
    assert "redis" not in [spec.name for spec in made.specs]
    assert spec_of(made, "controller").after == ()
    for spec in made.specs:
        assert "--redis-url" not in spec.argv, "processes read the URL from the recipe"
        assert "s3cret" not in f"{spec.argv} {spec.env}", "command lines are public, so they hold no password"


@pytest.mark.parametrize(
    ("cores", "sections", "engines", "trainer"),
    [
        ((0, 1), {}, [(0,)], (1,)),
        ((4, 7), {"engine": {"count": 2}}, [(4,), (4,)], (7,)),
        ((0, 1, 2, 3), {"engine": {"count": 2}}, [(0,), (1,)], (3,)),
        ((0,), {}, [None], None),
        (tuple(range(9)), {}, [None], None),
        ((0, 1), {"launch": {"pin": "none"}}, [None], None),
        ((0, 1), {"launch": {"threads": 2}}, [None], None),
    ],
)
def test_engines_and_trainer_are_pinned_to_different_cores_on_machines_with_few_cores(
    cores, sections, engines, trainer
):
    made = _plan(config_of(**sections, staleness={"j": 1, "k": 2}), cores)
    assert [spec.cpu for spec in made.specs if spec.name.startswith("engine")] == engines
    assert spec_of(made, "trainer").cpu == trainer
    assert all(spec.cpu is None for spec in made.specs if spec.name.split("-")[0] in ("redis", "controller", "actor"))


def test_processes_that_may_take_turns_with_all_cores_are_told_their_own_cores_instead_of_being_pinned():
    made = _plan(config_of(), (2, 5))
    for name, own in (("engine-0", "2"), ("trainer", "5")):
        spec = spec_of(made, name)
        assert (spec.cpu, spec.env["PIPELINERL_CORES"]) == (None, own)
    assert "PIPELINERL_CORES" not in spec_of(made, "actor-0").env
    made = _plan(config_of(trainer={"type": "jax"}), (2, 5))
    assert spec_of(made, "engine-0").cpu == (2,), "a trainer that cannot change its threads takes no turns"


def test_launch_plan_with_a_process_before_its_dependency_is_rejected():
    a, b = ProcessSpec(name="a", argv=("x",), after=("b",)), ProcessSpec(name="b", argv=("x",))
    with pytest.raises(ValueError, match="a waits for b, which must come before it"):
        Plan((a, b))
    with pytest.raises(ValueError, match="unique, got 'b' twice"):
        Plan((b, b))
    assert Plan((a,), {"b": "http://a/health"}).specs == (a,), "the process before it runs on another host"


def test_processes_of_a_trainer_form_one_group_with_a_rendezvous_port():
    config = config_of(trainer={"options": {"mesh": {"dp_replicate": 2, "dp_shard": 2}}})
    assert list(listening(config)) == [*listening(config_of()), "trainer"]
    made = _plan(config)
    members = [spec for spec in made.specs if spec.group == "trainer"]
    assert [spec.name for spec in members] == ["trainer", "trainer-rank-1", "trainer-rank-2", "trainer-rank-3"]
    meeting = 'trainer.options.distributed={coordinator="127.0.0.1:5003",token_file="/runs/x/tokens.json"}'
    for rank, spec in enumerate(members):
        assert spec.argv[4] == ("trainer-rank" if rank else "trainer")
        assert spec.argv[spec.argv.index("--set") + 1] == meeting
        assert (spec.cpu, spec.on_exit) == (None, OnExit.DONE)
        assert rank == 0 or spec.argv[5:9] == ("--recipe", "/runs/x/recipe.toml", "--rank", str(rank))
    assert min(spec.stop_order for spec in members[1:]) > spec_of(made, "trainer").stop_order, "rank 0 ends the others"


def test_trainer_forms_no_process_group_if_it_has_one_process_or_its_other_ranks_start_elsewhere():
    distributed = {"coordinator": "10.0.0.1:8476", "token_file": "/t"}
    for options in ({}, {"mesh": {"dp_shard": 1}}, {"mesh": {"dp_shard": 2}, "distributed": distributed}):
        made = _plan(config_of(trainer={"options": options}))
        assert [spec.name for spec in made.specs if "trainer" in spec.name] == ["trainer"]
        assert spec_of(made, "trainer").group is None and "--set" not in spec_of(made, "trainer").argv


def test_experiment_tracker_process_is_optional_and_stops_after_the_controller():
    assert "tracker" not in [spec.name for spec in _plan(config_of()).specs]
    made = _plan(config_of(trackers={"tensorboard": True}))
    tracker = spec_of(made, "tracker")
    assert (tracker.on_exit, tracker.after, tracker.health) == (OnExit.SPARE, ("controller",), None)
    assert tracker.stop_order > spec_of(made, "controller").stop_order
    assert not any("tracker" in spec.after for spec in made.specs), "no process waits for the tracker"
