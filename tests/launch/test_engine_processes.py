"""Requested engines start once and stopped engines stop, however often the status repeats the request."""

from __future__ import annotations

from dataclasses import replace
from itertools import count as ports_from
from pathlib import Path

from launch.devices import Devices, VisibleDevice
from launch.engine_processes import EngineProcesses
from launch.placement import place
from launch.plan import Launch, Plan, listening, processes_of
from launch.process import State
from launch.supervisor import Supervisor
from pipelinerl.config.recipe import parse
from pipelinerl.observability.status import FleetStatus, RequestedEngine, RunStatus
from pipelinerl.roles.role import OnExit
from pipelinerl.system.machine import free_ports

LAUNCH = Launch(
    config=parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}]}),
    run_dir=Path("/runs/x"),
    ports={"controller": 5000, "engine-0": 5001, "redis": 5002},
    cores=(0, 1),
    python="py",
)


def nobody(name: str) -> None:
    raise AssertionError(f"{name} is not beyond help")


def status(*requested: str, to_stop: tuple[str, ...] = ()) -> RunStatus:
    return RunStatus(
        run="x",
        fleet=FleetStatus(
            requested=tuple(RequestedEngine(name=name, type="bigram") for name in requested), to_stop=to_stop
        ),
    )


def test_requested_engine_has_a_type_and_an_exit_rule_of_its_own() -> None:
    recipes, requested = LAUNCH.engine("engine-0", port=5001), LAUNCH.engine("engine-1", port=5001, type="bigram")
    assert (recipes.on_exit, requested.on_exit) == (OnExit.RESTART, OnExit.SPARE)
    assert [*requested.argv[:-2], "--type", "bigram"] == [
        "engine-1" if word == "engine-0" else word for word in recipes.argv
    ] + ["--type", "bigram"]
    assert requested.health == "http://127.0.0.1:5001/health" and requested.cpu == recipes.cpu


def test_repeated_status_starts_each_engine_once(tmp_path: Path) -> None:
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, LAUNCH, give_up=nobody)
    for _ in range(2):
        staff.follow(status("engine-1", "engine-2", "engine-3", to_stop=("engine-3", "nobody")))
    assert [supervisor.knows(f"engine-{number}") for number in (1, 2, 3)] == [True, True, False]
    urls = {process.spec.health for process in supervisor._processes.values()}
    assert len(urls) == 2, "ports that are given, and not bound yet, are not given again"
    staff.follow(status("engine-1", to_stop=("engine-2",)))
    assert supervisor.pids == {}


def test_requested_engine_never_gets_the_port_of_a_dead_process(tmp_path: Path) -> None:
    """The port is free for a moment, but the dead process will need it again once it restarts."""
    ports = dict(zip(listening(LAUNCH.config), free_ports(3), strict=True))
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    EngineProcesses(supervisor, replace(LAUNCH, ports=ports), give_up=nobody).follow(status("engine-1", "engine-2"))
    given = {int(str(process.spec.health).split(":")[2].split("/")[0]) for process in supervisor._processes.values()}
    assert len(given) == 2 and not given & set(ports.values())


def test_controller_is_told_of_a_failed_engine_as_long_as_it_requests_the_engine(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, LAUNCH, give_up=told.append)
    staff.follow(status("engine-1"))
    supervisor._fail(supervisor._processes["engine-1"], "it has no model")
    for latest in (*[status("engine-1")] * 2, status("engine-1", to_stop=("engine-1",)), status()):
        staff.follow(latest)
    assert told == ["engine-1"] * 2


def on_gpus(count: int, tmp_path: Path, **engine: object) -> tuple[Supervisor, EngineProcesses, list[str], list[str]]:
    """Return an idle launch on `count` GPUs, with the lists of its announcements and of the engines that it gave up."""
    sections = {"engine": {"type": "torch", **engine}, "trainer": {"memory_share": 0.4} if engine else {}}
    config = parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], **sections})
    devices = Devices(tuple(VisibleDevice(str(index)) for index in range(count)))
    ports = dict(zip(listening(config), ports_from(5000), strict=False))
    launch = replace(LAUNCH, config=config, ports=ports, placement=place(config, devices))
    announced: list[str] = []
    given_up: list[str] = []
    supervisor = Supervisor(processes_of(launch), tmp_path, announce=announced.append)
    return supervisor, EngineProcesses(supervisor, launch, give_up=given_up.append), announced, given_up


def wants(*names: str, to_stop: tuple[str, ...] = (), type: str = "torch") -> RunStatus:
    requested = tuple(RequestedEngine(name=name, type=type) for name in names)
    return RunStatus(run="x", fleet=FleetStatus(requested=requested, to_stop=to_stop))


def seen_by(supervisor: Supervisor, name: str) -> str:
    return supervisor._processes[name].spec.env["CUDA_VISIBLE_DEVICES"]


def test_requested_engines_get_free_devices_and_release_them(tmp_path: Path) -> None:
    supervisor, staff, _, given_up = on_gpus(4, tmp_path)
    staff.follow(wants("engine-1", "engine-2"))
    assert [seen_by(supervisor, name) for name in ("engine-0", "engine-1", "engine-2", "trainer")] == [
        "0",
        "1",
        "2",
        "3",
    ]
    staff.follow(wants("engine-2", to_stop=("engine-1",)))  # engine-1 never ran, so it ended at once
    staff.follow(wants("engine-2", "engine-3", to_stop=("engine-1",)))
    assert seen_by(supervisor, "engine-3") == "1"
    assert given_up == []


def test_stopped_engine_of_the_recipe_frees_its_device(tmp_path: Path) -> None:
    supervisor, staff, announced, given_up = on_gpus(2, tmp_path)
    supervisor._processes["engine-0"].state = State.STOPPING  # the state after SIGTERM
    staff.follow(wants("engine-1", to_stop=("engine-0",)))
    assert not supervisor.knows("engine-1"), "it waits for the device that is being given back"
    supervisor._processes["engine-0"].state = State.ENDED
    staff.follow(wants("engine-1", to_stop=("engine-0",)))
    assert seen_by(supervisor, "engine-1") == "0"
    assert (announced, given_up) == (["starting engine-1"], [])


def test_refused_engine_has_the_missing_device_in_its_log(tmp_path: Path) -> None:
    supervisor, staff, announced, given_up = on_gpus(2, tmp_path)
    for _ in range(2):
        staff.follow(wants("engine-1"))
    sentence = "engine-1 takes 1 GPU, and too few are free (GPU 0: engine-0; GPU 1: trainer); take an engine out first"
    assert [text.startswith(f"the run continues without engine-1: {sentence}") for text in announced] == [True]
    assert (tmp_path / "logs" / "engine-1.log").read_text().startswith(f"pipelinerl: {sentence}")
    assert given_up == ["engine-1"], "the controller is told until it wants it no more"
    staff.follow(wants("engine-2", type="bigram"))
    assert supervisor.knows("engine-2") and "CUDA_VISIBLE_DEVICES" not in supervisor._processes["engine-2"].spec.env


def test_requested_engine_shares_the_only_gpu_if_the_memory_shares_allow_it(tmp_path: Path) -> None:
    supervisor, staff, _, given_up = on_gpus(1, tmp_path, memory_share=0.3)
    staff.follow(wants("engine-1"))
    assert seen_by(supervisor, "engine-1") == "0"
    for _ in range(2):
        staff.follow(wants("engine-1", "engine-2"))
    assert given_up == ["engine-2"], "0.4 + 0.3 + 0.3 is all of it"


def test_unused_device_is_preferred_to_a_shared_one(tmp_path: Path) -> None:
    supervisor, staff, _, _ = on_gpus(3, tmp_path, memory_share=0.3)  # engine-0 has GPU 0, the trainer GPU 2
    staff.follow(wants("engine-1"))
    assert seen_by(supervisor, "engine-1") == "1"


def test_engine_of_another_type_does_not_get_the_recipes_options(tmp_path: Path) -> None:
    supervisor, staff, _, _ = on_gpus(4, tmp_path, type="vllm", options={"block_size": 32})
    staff.follow(wants("engine-1"))
    staff.follow(wants("engine-1", "engine-2", type="vllm"))
    assert "engine.options={}" in supervisor._processes["engine-1"].spec.argv
    assert "engine.options={}" not in supervisor._processes["engine-2"].spec.argv
