"""The supervisor of a run's processes, with small real processes: deaths, restart budgets, deadlines and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import count as ports_from
from pathlib import Path

import pytest

from launch.hosts import Devices, VisibleDevice
from launch.placement import place
from launch.plan import Launch, Plan, ProcessSpec, listening, processes_of
from launch.process import State
from launch.supervisor import EngineProcesses, RunOutcome, Supervisor
from pipelinerl.observability.status import FleetStatus, RequestedEngine, RunStatus
from pipelinerl.roles.role import OnExit
from pipelinerl.system.machine import free_ports, is_free
from tests.launch.config import config_of
from tests.patience import PATIENCE_S, SOON_S, is_running, wait_until

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
SERVE = (
    "import http.server, sys\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
)


def _spec(name, code, *arguments, **rest):
    argv = (sys.executable, "-S", "-E", "-c", code, *map(str, arguments))
    return ProcessSpec(name=name, argv=argv, **rest)


def _run(specs, run_dir, **rest):
    messages = []
    options = {"start_timeout_s": PATIENCE_S, "grace_s": SOON_S, "tick_every_s": 0.02, **rest}
    supervisor = Supervisor(Plan(tuple(specs)), run_dir, announce=messages.append, **options)
    return supervisor.run(), messages


def test_run_starts_a_process_once_its_dependency_is_healthy_and_leaves_no_process_behind(tmp_path):
    (port,) = free_ports(1)
    pid_file = tmp_path / "pid"
    late = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(0.4)\n"
    service = _spec("service", late + SERVE, port, health=f"http://127.0.0.1:{port}/health")
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('worked')"
    main = _spec("main", probe, after=("service",), on_exit=OnExit.COMPLETE, restarts=0)
    result, messages = _run([service, main], tmp_path)
    assert (result.outcome, result.exit_status, messages) == (RunOutcome.COMPLETED, 0, [])
    log = tmp_path / "logs" / "main.log"
    assert log.read_text() == "worked\n" and log.stat().st_mode & 0o777 == 0o600, "user code may log private data"
    assert not is_running(int(pid_file.read_text()))
    assert is_free(port)


def test_run_fails_with_the_end_of_a_processs_log_when_its_restart_budget_is_spent(tmp_path):
    flaky = _spec("flaky", f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); print('no luck'); raise SystemExit(3)",
                  restarts=2)  # fmt: skip
    result, messages = _run([flaky], tmp_path)
    assert result.outcome is RunOutcome.FAILED
    assert "flaky ended (exit status 3) after 2 restarts, its whole budget" in result.message
    assert "    no luck" in result.message
    assert (tmp_path / "starts").read_text() == "xxx"
    assert messages == [
        "flaky ended (exit status 3); restarting it in 0.5 s (1 of 2)",
        "flaky ended (exit status 3); restarting it in 1 s (2 of 2)",
    ]


def test_supervisor_restarts_a_killed_process(tmp_path):
    marker = tmp_path / "second"
    code = (
        f"import os, pathlib, signal; m = pathlib.Path({str(marker)!r})\n"
        "if m.exists(): raise SystemExit(0)\n"
        "m.touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result, messages = _run([_spec("main", code, on_exit=OnExit.COMPLETE)], tmp_path)
    assert result.outcome is RunOutcome.COMPLETED
    assert messages == ["main ended (killed by SIGKILL); restarting it in 0.5 s (1 of 3)"]


def test_all_processes_of_a_group_are_restarted_if_one_of_them_dies(tmp_path):
    """Rank 1 dies after the others have started and rank 2 has finished its work, which counts as one death."""
    begin = "import os, pathlib, sys, time; d = pathlib.Path(sys.argv[1]); me = sys.argv[2]\n" + (
        "with (d / me).open('a') as file: file.write('x')\n"
        "def begun(times, *names):\n"
        "    while not all((d / n).exists() and len((d / n).read_text()) == times for n in names): time.sleep(0.02)\n"
    )
    dies = begin + (
        "if (d / me).read_text() != 'x': time.sleep(60)\nbegun(1, 'rank-0', 'rank-2'); time.sleep(1.0); os._exit(1)"
    )
    codes = {"rank-0": begin + "time.sleep(60)", "rank-1": dies, "rank-2": begin}
    specs = [_spec(name, code, tmp_path, name, on_exit=OnExit.DONE, group="trainer") for name, code in codes.items()]
    specs += [
        _spec("apart", begin + "time.sleep(60)", tmp_path, "apart"),
        _spec("main", begin + "begun(2, 'rank-0', 'rank-1', 'rank-2')", tmp_path, "main", on_exit=OnExit.COMPLETE),
    ]
    result, messages = _run(specs, tmp_path)
    assert result.outcome is RunOutcome.COMPLETED
    died = "rank-1 ended (exit status 1); restarting it in 0.5 s (1 of 3)"
    assert messages == [died, "restarting rank-0 with it", "restarting rank-2 with it"]
    assert (tmp_path / "apart").read_text() == "x"


def test_supervisor_does_not_restart_a_process_that_finished_its_work(tmp_path):
    starts = tmp_path / "starts"
    done = _spec("trainer", f"open({str(starts)!r}, 'a').write('x')", on_exit=OnExit.DONE)
    wait = f"import os, time\nwhile not os.path.exists({str(starts)!r}): time.sleep(0.01)\ntime.sleep(1.0)"
    main = _spec("main", wait, on_exit=OnExit.COMPLETE)
    result, messages = _run([done, main], tmp_path)
    assert (result.outcome, messages, starts.read_text()) == (RunOutcome.COMPLETED, [], "x")


def test_supervisor_does_not_restart_a_process_that_exits_with_a_user_error(tmp_path):
    (port,) = free_ports(1)
    line = '{"level": "error", "message": "port taken", "time": 1}'
    result, messages = _run([_spec("engine-0", f"print({line!r}); raise SystemExit(2)", restarts=9)], tmp_path)
    assert result.outcome is RunOutcome.FAILED
    assert result.message.startswith("engine-0 ended (exit status 2); its log ")
    assert result.message.endswith("    error: port taken")
    assert messages == []
    assert is_free(port)


def test_run_fails_with_the_name_of_the_process_that_starts_too_slowly(tmp_path):
    (port,) = free_ports(1)
    mute = _spec("engine-0", "print('loading', flush=True); " + SLEEP, health=f"http://127.0.0.1:{port}/health")
    result, _ = _run([mute], tmp_path, start_timeout_s=3.0)
    assert result.outcome is RunOutcome.FAILED
    assert f"engine-0 did not answer http://127.0.0.1:{port}/health within 3 s" in result.message
    assert result.message.endswith("    loading")


def test_run_fails_with_the_name_of_the_program_that_is_missing(tmp_path):
    result, _ = _run([ProcessSpec(name="ghost", argv=("/no/such/program",), restarts=0)], tmp_path)
    assert result.outcome is RunOutcome.FAILED
    assert "/no/such/program" in result.message


def test_ctrl_c_stops_processes_in_order_and_prints_the_resume_command(tmp_path):
    order = tmp_path / "order"

    def polite(name, stop_order):
        code = (
            "import signal, sys, time\n"
            f"def end(*_): time.sleep(0.1); open({str(order)!r}, 'a').write({name!r}); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
        )
        return _spec(name, code, stop_order=stop_order)

    logs = [tmp_path / "logs" / f"{name}.log" for name in "cab"]

    def interrupt_when_ready():
        if all(log.exists() and log.read_text() for log in logs):
            os.kill(os.getpid(), signal.SIGINT)

    specs = [polite("c", 2), polite("a", 0), polite("b", 1)]
    result, messages = _run(specs, tmp_path, on_tick=interrupt_when_ready, tick_every_s=0.5)
    assert (result.outcome, result.exit_status) == (RunOutcome.STOPPED, 130)
    assert result.message == f"resume with: pipelinerl run --resume {tmp_path}"
    assert order.read_text() == "abc"
    assert messages == ["stopping; press Ctrl-C again to kill at once"]


def _interrupted_run(tmp_path, main, *, suspend, interrupts=1, save_s=PATIENCE_S):
    """Run a supervisor with one process, whose end completes the run; send SIGINT when the process has printed."""
    log = tmp_path / "logs" / "main.log"
    interrupts_sent = [0]

    def interrupt():
        if log.exists() and log.read_text() and interrupts_sent[0] < interrupts:
            interrupts_sent[0] += 1
            os.kill(os.getpid(), signal.SIGINT)

    spec = _spec("main", main, on_exit=OnExit.COMPLETE)
    return _run([spec], tmp_path, on_tick=interrupt, suspend=suspend, save_s=save_s, grace_s=PATIENCE_S)


def test_run_saves_its_state_on_ctrl_c_before_it_stops(tmp_path):
    suspend_file = tmp_path / "suspend"
    main = (
        "import pathlib, time\nprint('up', flush=True)\n"
        f"while not pathlib.Path({str(suspend_file)!r}).exists(): time.sleep(0.01)"
    )

    def suspend():
        suspend_file.touch(exist_ok=False)  # raises if `suspend` is called twice
        return True

    result, messages = _interrupted_run(tmp_path, main, suspend=suspend)
    assert (result.outcome, result.exit_status) == (RunOutcome.STOPPED, 130)
    assert result.message == f"resume with: pipelinerl run --resume {tmp_path}"
    assert messages[0].startswith("saving; press Ctrl-C again to kill at once")


@pytest.mark.parametrize(
    ("hears", "interrupts", "save_s", "says"),
    [
        (True, 1, 0.1, "the state was not saved within 0.1 s (launch.save_s)"),
        (True, 2, PATIENCE_S, "saving; press Ctrl-C again"),
        (False, 1, PATIENCE_S, "stopping; press Ctrl-C again"),
    ],
    ids=["saves too slowly", "second Ctrl-C kills at once", "no controller to save"],
)
def test_run_that_does_not_save_in_time_is_stopped(tmp_path, hears, interrupts, save_s, says):
    main, began = STUBBORN if interrupts == 2 else f"print('up', flush=True)\n{SLEEP}", time.monotonic()
    result, messages = _interrupted_run(tmp_path, main, suspend=lambda: hears, interrupts=interrupts, save_s=save_s)
    assert result.outcome is RunOutcome.STOPPED and time.monotonic() - began < SOON_S
    assert any(line.startswith(says) for line in messages), messages


def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    log = tmp_path / "logs" / "stubborn.log"
    main = f"import pathlib, time\nwhile not pathlib.Path({str(log)!r}).read_text(): time.sleep(0.01)"
    specs = [_spec("stubborn", STUBBORN), _spec("main", main, on_exit=OnExit.COMPLETE)]
    start = time.monotonic()
    result, messages = _run(specs, tmp_path, grace_s=0.3)
    assert result.outcome is RunOutcome.COMPLETED
    assert messages == ["stubborn did not stop within 0.3 s; killing it"]
    assert time.monotonic() - start < SOON_S


def test_process_with_a_longer_grace_period_of_its_own_may_finish_its_work(tmp_path):
    log = tmp_path / "logs" / "slow.log"
    slow = """import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)
signal.pause()\ntime.sleep(1.0)\nprint('done', flush=True)"""
    main = f"import pathlib, time\nwhile not pathlib.Path({str(log)!r}).read_text(): time.sleep(0.01)"
    specs = [_spec("slow", slow, grace_s=SOON_S), _spec("main", main, on_exit=OnExit.COMPLETE)]
    _, messages = _run(specs, tmp_path, grace_s=0.1)
    assert messages == [] and log.read_text().split() == ["up", "done"]


def test_child_processes_of_a_supervised_process_end_with_it(tmp_path):
    pid_file = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, os\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-E', '-c', {SLEEP!r}])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
    )
    result, _ = _run([_spec("main", code, on_exit=OnExit.COMPLETE)], tmp_path)
    assert result.outcome is RunOutcome.COMPLETED
    wait_until(lambda: not is_running(int(pid_file.read_text())), "it has happened")


def test_no_process_survives_a_killed_supervisor(tmp_path):
    """After `kill -9` of the supervisor, the kernel kills its children, a reaper process kills the grandchildren."""
    code = (
        "import subprocess, sys, os, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-E', '-c', {SLEEP!r}])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "time.sleep(60)\n"
    )
    script = textwrap.dedent(f"""
        import pathlib, sys
        from launch.supervisor import Supervisor
        from launch.plan import Plan, ProcessSpec
        spec = ProcessSpec(name="p", argv=(sys.executable, "-S", "-E", "-c", {code!r}))
        Supervisor(Plan((spec,)), pathlib.Path({str(tmp_path)!r})).run()
    """)
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "it has happened")
    child, grandchild = map(int, pids.read_text().split())
    assert is_running(child)
    assert is_running(grandchild)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not is_running(child) and not is_running(grandchild), "it has happened")


def test_exception_in_the_supervisors_periodic_callback_stops_all_processes(tmp_path):
    seen = []
    supervisor: Supervisor

    def broken():
        if supervisor.pids:
            seen.extend(supervisor.pids.values())
            raise OSError("no terminal")

    supervisor = Supervisor(Plan((_spec("p", SLEEP),)), tmp_path, on_tick=broken, tick_every_s=0.01)
    with pytest.raises(OSError, match="no terminal"):
        supervisor.run()
    assert seen
    assert not any(is_running(pid) for pid in seen)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_supervised_process_runs_only_on_the_cpu_cores_in_its_specification(tmp_path):
    core = max(os.sched_getaffinity(0))
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    _run([_spec("main", code, on_exit=OnExit.COMPLETE, cpu=(core,))], tmp_path)
    assert (tmp_path / "logs" / "main.log").read_text() == f"[{core}]\n"


# --- processes added and stopped during a run -------------------------------------------------------------------------


def _changing(run_dir, script):
    """Run a supervisor until `script` returns True; `script` is called at each tick and may add or stop processes."""
    seen, messages = run_dir / "seen", []
    wait = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    supervisor: Supervisor

    def tick():
        if script(supervisor, messages):
            seen.touch()

    options = {"start_timeout_s": PATIENCE_S, "grace_s": 0.5, "on_tick": tick, "tick_every_s": 0.02}
    plan = Plan((_spec("main", wait, on_exit=OnExit.COMPLETE),))
    supervisor = Supervisor(plan, run_dir, announce=messages.append, **options)
    return supervisor.run(), messages


@pytest.mark.parametrize("code", [f"print('ready', flush=True); {SLEEP}", STUBBORN], ids=["ends", "ignores SIGTERM"])
def test_process_can_be_added_to_and_stopped_in_a_live_run(tmp_path, code):
    seen, log = [], tmp_path / "logs" / "spare.log"

    def script(supervisor, _):
        if not seen and not supervisor.knows("spare"):
            supervisor.add(_spec("spare", code, on_exit=OnExit.SPARE))
        elif not seen and log.is_file() and "ready" in log.read_text():
            seen.append(supervisor.pids["spare"])
            supervisor.stop_engine("spare")
            supervisor.stop_engine("nobody")
        return bool(seen) and "spare" not in supervisor.pids

    result, messages = _changing(tmp_path, script)
    assert result.outcome is RunOutcome.COMPLETED and not is_running(seen[0])
    assert messages == ["starting spare", "stopping spare"], "a stop on request does not count as a death"


def test_run_continues_if_a_process_that_was_added_to_it_fails(tmp_path):
    broken = _spec("spare", "print('no such type'); raise SystemExit(2)", on_exit=OnExit.SPARE)

    def script(supervisor, messages):
        if not messages and not supervisor.knows("spare"):
            supervisor.add(broken)
        return len(messages) == 2

    result, messages = _changing(tmp_path, script)
    assert result.outcome is RunOutcome.COMPLETED
    assert messages[1].startswith("the run continues without spare: spare ended (exit status 2); its log")
    assert "no such type" in messages[1]


def test_process_waits_until_its_dependency_on_another_host_is_healthy(tmp_path):
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}/"
    main = _spec("main", "print('worked')", after=("elsewhere",), on_exit=OnExit.COMPLETE)
    plan = Plan((main,), {"elsewhere": address})
    messages = []
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", SERVE, str(port)]) as other:
        try:
            options = {"start_timeout_s": PATIENCE_S, "grace_s": SOON_S, "announce": messages.append}
            result = Supervisor(plan, tmp_path, **options).run()
        finally:
            other.kill()
    assert (result.outcome, messages) == (RunOutcome.COMPLETED, [])
    assert (tmp_path / "logs" / "main.log").read_text() == "worked\n"
    late = Supervisor(plan, tmp_path, start_timeout_s=0.0, grace_s=SOON_S, announce=messages.append).run()
    assert late.outcome is RunOutcome.FAILED
    assert late.message.startswith(f"main waits for elsewhere, which did not answer {address} within 0 s")


LAUNCH = Launch(
    config=config_of(),
    run_dir=Path("/runs/x"),
    ports={"controller": 5000, "engine-0": 5001, "redis": 5002},
    cores=(0, 1),
    python="py",
)


def test_engine_added_during_a_run_has_its_own_type_and_exit_rule():
    recipes, requested = LAUNCH.engine("engine-0", port=5001), LAUNCH.engine("engine-1", port=5001, type="bigram")
    assert (recipes.on_exit, requested.on_exit) == (OnExit.RESTART, OnExit.SPARE)
    assert [*requested.argv[:-2], "--type", "bigram"] == [
        "engine-1" if word == "engine-0" else word for word in recipes.argv
    ] + ["--type", "bigram"]
    assert requested.health == "http://127.0.0.1:5001/health" and requested.cpu == recipes.cpu


def test_engine_requested_by_several_status_messages_of_the_controller_is_started_once(tmp_path):
    """Its port is neither that of another requested engine nor that of a dead process, which needs it again."""
    ports, given_up = dict(zip(listening(LAUNCH.config), free_ports(3), strict=True)), []
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, replace(LAUNCH, ports=ports), give_up=given_up.append)
    for _ in range(2):
        staff.follow(wants("engine-1", "engine-2", "engine-3", to_stop=("engine-3", "nobody"), type="bigram"))
    assert [supervisor.knows(f"engine-{number}") for number in (1, 2, 3)] == [True, True, False]
    taken = {int(str(process.spec.health).split(":")[2].split("/")[0]) for process in supervisor._processes.values()}
    assert len(taken) == 2 and not taken & set(ports.values())
    staff.follow(wants("engine-1", to_stop=("engine-2",)))
    assert supervisor.pids == {} and given_up == []


def test_failed_engine_is_reported_as_long_as_the_controller_requests_it(tmp_path):
    reported = []
    supervisor = Supervisor(Plan(()), tmp_path, announce=lambda text: None)
    staff = EngineProcesses(supervisor, LAUNCH, give_up=reported.append)
    staff.follow(wants("engine-1", type="bigram"))
    supervisor._fail(supervisor._processes["engine-1"], "it has no model")
    for latest in (*[wants("engine-1")] * 2, wants("engine-1", to_stop=("engine-1",)), wants()):
        staff.follow(latest)
    assert reported == ["engine-1"] * 2


def on_gpus(count, tmp_path, **engine):
    """Return a supervisor and its `EngineProcesses` on `count` GPUs, with no process started, and two lists.

    The first list receives the supervisor's announcements, the second the names of engines that are given up.
    """
    sections = {"engine": {"type": "torch", **engine}, "trainer": {"memory_share": 0.4} if engine else {}}
    config = config_of(**sections)
    devices = Devices(tuple(VisibleDevice(str(index)) for index in range(count)))
    ports = dict(zip(listening(config), ports_from(5000), strict=False))
    launch = replace(LAUNCH, config=config, ports=ports, placement=place(config, devices))
    announced = []
    given_up = []
    supervisor = Supervisor(processes_of(launch), tmp_path, announce=announced.append)
    return supervisor, EngineProcesses(supervisor, launch, give_up=given_up.append), announced, given_up


def wants(*names, to_stop=(), type="torch"):
    requested = tuple(RequestedEngine(name=name, type=type) for name in names)
    return RunStatus(run="x", fleet=FleetStatus(requested=requested, to_stop=to_stop))


def seen_by(supervisor, name):
    return supervisor._processes[name].spec.env["CUDA_VISIBLE_DEVICES"]


def test_engines_added_during_a_run_get_free_gpus_and_release_them_when_they_end(tmp_path):
    supervisor, staff, _, given_up = on_gpus(4, tmp_path)
    staff.follow(wants("engine-1", "engine-2"))
    assert [seen_by(supervisor, name) for name in ("engine-0", "engine-1", "engine-2", "trainer")] == [
        "0",
        "1",
        "2",
        "3",
    ]
    staff.follow(wants("engine-2", to_stop=("engine-1",)))  # frees its GPU immediately: engine-1 never started
    staff.follow(wants("engine-2", "engine-3", to_stop=("engine-1",)))
    assert seen_by(supervisor, "engine-3") == "1"
    assert given_up == []


def test_stopped_engine_of_the_recipe_frees_its_gpu(tmp_path):
    supervisor, staff, announced, given_up = on_gpus(2, tmp_path)
    supervisor._processes["engine-0"].state = State.STOPPING  # SIGTERM was sent, and the process has not ended yet
    staff.follow(wants("engine-1", to_stop=("engine-0",)))
    assert not supervisor.knows("engine-1"), "the engine waits for the device of the stopping process"
    supervisor._processes["engine-0"].state = State.ENDED
    staff.follow(wants("engine-1", to_stop=("engine-0",)))
    assert seen_by(supervisor, "engine-1") == "0"
    assert (announced, given_up) == (["starting engine-1"], [])


def test_log_of_an_engine_for_which_no_gpu_is_free_says_which_processes_use_the_gpus(tmp_path):
    supervisor, staff, announced, given_up = on_gpus(2, tmp_path)
    for _ in range(2):
        staff.follow(wants("engine-1"))
    sentence = "engine-1 takes 1 GPU, and too few are free (GPU 0: engine-0; GPU 1: trainer); take an engine out first"
    assert [text.startswith(f"the run continues without engine-1: {sentence}") for text in announced] == [True]
    assert (tmp_path / "logs" / "engine-1.log").read_text().startswith(f"pipelinerl: {sentence}")
    assert given_up == ["engine-1"], "the failure is reported until the engine is no longer requested"
    staff.follow(wants("engine-2", type="bigram"))
    assert supervisor.knows("engine-2") and "CUDA_VISIBLE_DEVICES" not in supervisor._processes["engine-2"].spec.env


def test_engine_added_during_a_run_shares_the_only_gpu_if_memory_shares_allow_it(tmp_path):
    supervisor, staff, _, given_up = on_gpus(1, tmp_path, memory_share=0.3)
    staff.follow(wants("engine-1"))
    assert seen_by(supervisor, "engine-1") == "0"
    for _ in range(2):
        staff.follow(wants("engine-1", "engine-2"))
    assert given_up == ["engine-2"], "the shares 0.4 + 0.3 + 0.3 use all of the memory"


def test_engine_of_another_type_does_not_get_the_recipes_engine_options(tmp_path):
    supervisor, staff, _, _ = on_gpus(4, tmp_path, type="vllm", options={"block_size": 32})
    staff.follow(wants("engine-1"))
    staff.follow(wants("engine-1", "engine-2", type="vllm"))
    assert "engine.options={}" in supervisor._processes["engine-1"].spec.argv
    assert "engine.options={}" not in supervisor._processes["engine-2"].spec.argv
