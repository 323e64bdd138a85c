"""Who is requested is started once, who is to_stop is stopped, however often the controller says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.engine_processes import EngineProcesses
from launch.plan import Launch, OnExit, Plan, Ports
from launch.ports import free_ports
from launch.supervisor import Supervisor
from pipelinerl.config.recipe import parse
from pipelinerl.observability.status import RequestedEngine, RunStatus

LAUNCH = Launch(
    config=parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}]}),
    run_dir=Path("/runs/x"),
    ports=Ports(controller=5000, engines=(5001,), redis=5002),
    token_file=Path("/runs/x/tokens.json"),
    cores=(0, 1),
    python="py",
)


def nobody(name: str) -> None:
    raise AssertionError(f"{name} is not beyond help")


def status(*requested: str, to_stop: tuple[str, ...] = ()) -> RunStatus:
    return RunStatus(
        run="x", requested=tuple(RequestedEngine(name=name, type="bigram") for name in requested), to_stop=to_stop
    )


def test_an_engine_that_was_hired_is_one_like_the_recipes_but_for_its_type_and_its_end() -> None:
    recipes, requested = LAUNCH.engine("engine-0", port=5001), LAUNCH.engine("engine-1", port=5001, type="bigram")
    assert (recipes.on_exit, requested.on_exit) == (OnExit.RESTART, OnExit.SPARE)
    assert [*requested.argv[:-2], "--type", "bigram"] == [
        "engine-1" if word == "engine-0" else word for word in recipes.argv
    ] + ["--type", "bigram"]
    assert requested.health == "http://127.0.0.1:5001/health" and requested.cpu == recipes.cpu


def test_the_status_says_the_whole_each_time(tmp_path: Path) -> None:
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, LAUNCH, give_up=nobody)
    for _ in range(2):
        staff.follow(status("engine-1", "engine-2", "engine-3", to_stop=("engine-3", "nobody")))
    assert [supervisor.knows(f"engine-{number}") for number in (1, 2, 3)] == [True, True, False]
    urls = {process.spec.health for process in supervisor._processes.values()}
    assert len(urls) == 2, "ports that are given, and not bound yet, are not given again"
    staff.follow(status("engine-1", to_stop=("engine-2",)))
    assert supervisor.pids == {}


def test_no_hired_engine_is_given_the_port_of_a_process_that_is_down(tmp_path: Path) -> None:
    """Nothing listens there for a moment: whoever is started again would find its port taken, and fail the run."""
    ports = Ports.of(LAUNCH.config, free_ports(Ports.count(LAUNCH.config)))
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    EngineProcesses(supervisor, replace(LAUNCH, ports=ports), give_up=nobody).follow(status("engine-1", "engine-2"))
    given = {int(str(process.spec.health).split(":")[2].split("/")[0]) for process in supervisor._processes.values()}
    assert len(given) == 2 and not given & ports.all


def test_the_controller_hears_of_an_engine_that_cannot_be_had_until_it_wants_it_no_more(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, LAUNCH, give_up=told.append)
    staff.follow(status("engine-1"))
    supervisor._fail(supervisor._processes["engine-1"], "it has no model")
    for latest in (*[status("engine-1")] * 2, status("engine-1", to_stop=("engine-1",)), status()):
        staff.follow(latest)
    assert told == ["engine-1"] * 2
