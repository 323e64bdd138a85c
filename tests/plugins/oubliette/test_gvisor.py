"""The strong isolation tier of the sandbox, gVisor (`runsc`): its configuration, its errors, and programs run in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.plugins.oubliette import control_groups, gvisor, probe, toolchains
from pipelinerl.plugins.oubliette.attacks import ATTACKS
from pipelinerl.plugins.oubliette.runs import Ending, Limits, Run, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
from tests.patience import PATIENCE_S
from tests.plugins.oubliette.attacks_as_nobody import delegated


def test_program_in_gvisor_sees_only_read_only_files_and_its_own_temporary_folder(tmp_path):
    run = Run(python="/tmp/main.py", files=(("main.py", b"print(1)"),), stdin=b"in", limits=Limits(disk_bytes=1 << 20))
    gvisor.lay_out(tmp_path, run)
    config = json.loads((tmp_path / "config.json").read_text())
    mounts = {mount["destination"]: mount for mount in config["mounts"]}
    assert mounts["/tmp"]["type"] == "tmpfs" and f"size={1 << 20}" in mounts["/tmp"]["options"]
    assert mounts["/tmp/main.py"]["source"] == str(tmp_path / "given" / "main.py")
    binds = [mount for mount in mounts.values() if mount["type"] == "bind"]
    assert len(binds) > 1 and all("ro" in mount["options"] for mount in binds)
    assert config["root"] == {"path": str(tmp_path / "root"), "readonly": True}
    assert not {"/home", "/root", "/etc", "/var", "/proc/1", os.getcwd()} & mounts.keys()
    process = config["process"]
    assert (process["user"], process["capabilities"]) == ({"uid": 1000, "gid": 1000}, {})
    assert process["args"][1:] == ["-I", "/tmp/main.py"]
    assert {"type": "RLIMIT_NOFILE", "soft": 128, "hard": 128} in process["rlimits"]
    refused = {name for rule in config["linux"]["seccomp"]["syscalls"] for name in rule["names"]}
    assert {"socket", "mount", "ptrace", "bpf", "unshare"} <= refused
    assert (tmp_path / "stdin").read_bytes() == b"in"


def test_errors_of_gvisors_runsc_program_are_read_from_its_log(tmp_path):
    assert gvisor.troubles(tmp_path) == ""
    lines = ({"level": "warning", "msg": "no"}, {"level": "error", "msg": "starting sandbox: gone"}, 7)
    (tmp_path / "log").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "no json\n")
    assert gvisor.troubles(tmp_path) == "starting sandbox: gone"


def test_error_for_a_missing_runsc_program_is_one_sentence(monkeypatch):
    monkeypatch.setattr(gvisor, "executable", lambda: None)
    with pytest.raises(SandboxMissing, match=r"^the strong sandbox needs gVisor's runsc, which is not installed; .*"):
        probe.opened(Tier.STRONG)
    monkeypatch.setattr(gvisor, "executable", lambda: "/usr/bin/runsc")
    monkeypatch.setattr(control_groups, "available", lambda: "nobody may")
    with pytest.raises(SandboxMissing, match=r"^the strong sandbox needs control groups, .* here: nobody may$"):
        probe.opened(Tier.STRONG)


@pytest.fixture
def alone():
    try:
        sandbox = Sandbox(lambda number: isolation_of(Tier.STRONG, number), at_once=1, slots_each=1)
    except SandboxMissing as error:
        pytest.skip(f"left out: the strong sandbox, since {error}")
    yield sandbox
    sandbox.close()


def test_programs_run_in_gvisor_and_leave_no_processes_or_control_groups(alone):
    python = toolchains.find("python")
    limits = Limits(cpu_s=PATIENCE_S, wall_s=PATIENCE_S)
    source = b"import sys\nprint(2 * int(input()))\nsys.exit(3)"
    result = alone.run(python.running(source, b"21\n", limits))
    assert (result.stdout, result.ending, result.code, result.tier) == (b"42\n", Ending.EXITED, 3, Tier.STRONG)
    result = alone.run(Run(argv=("/tmp/program",), files=(("program", b"no elf"),), limits=limits))
    assert (result.ending, result.code) == (Ending.EXITED, 126)
    (place,) = alone._places
    group = place.slot.group.group
    assert group is not None and group.processes() == []
    alone.close()
    assert not [folder for folder in group._groups if folder.exists()]


@pytest.mark.slow
def test_result_of_a_gvisor_run_names_the_limit_that_the_program_exceeded(alone):
    python = toolchains.find("python")

    def ending(source, **limits):
        made = Limits(**({"cpu_s": PATIENCE_S, "wall_s": PATIENCE_S} | limits))
        return alone.run(python.running(source, b"", made)).ending

    assert ending(b"while True: pass", cpu_s=0.2) is Ending.CPU_TIME
    assert ending(b"import time\ntime.sleep(3600)", wall_s=0.5) is Ending.DEADLINE
    assert ending(b"while True: print('x' * 1000)", output_bytes=5000) is Ending.OUTPUT
    forks = (
        b"import os, time\nfor _ in range(12):\n    if os.fork() == 0: break\nx = b'x' * (60 << 20)\ntime.sleep(3600)"
    )
    assert ending(forks, memory_bytes=128 << 20) is Ending.MEMORY
    assert ending(b"import os\nos.kill(os.getpid(), 9)") is Ending.SIGNALLED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gvisor_sandbox_stops_all_attacks(alone):
    findings = probe.attacked(lambda number: isolation_of(Tier.STRONG, number), ATTACKS)
    assert [finding for finding in findings if finding.defence is probe.Defence.ESCAPED] == []
    assert sum(finding.defence is probe.Defence.HELD for finding in findings) >= 80


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gvisor_sandbox_of_an_unprivileged_user_stops_all_attacks(alone):
    if os.geteuid() != 0:
        pytest.skip("left out: attacks on gVisor as another user, since this one is not root and they were tried as it")
    name = f"delegated-{os.getpid()}"
    try:
        program = [sys.executable, str(Path(__file__).with_name("attacks_as_nobody.py")), name]
        output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    finally:
        for group in delegated(name):
            group.rmdir()
    counts = json.loads(output)["strong"]
    assert counts["escaped"] == [] and counts["held"] >= 80
