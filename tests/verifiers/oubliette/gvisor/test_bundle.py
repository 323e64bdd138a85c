"""gVisor's configuration of a run, and the errors read from its log."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipelinerl.verifiers.oubliette.gvisor import bundle
from pipelinerl.verifiers.oubliette.runs import Limits, Run


def test_guest_sees_the_same_files_as_in_other_tiers_and_read_only(tmp_path: Path) -> None:
    run = Run(python="/tmp/main.py", files=(("main.py", b"print(1)"),), stdin=b"in", limits=Limits(disk_bytes=1 << 20))
    bundle.lay_out(tmp_path, run)
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


def test_runsc_errors_are_distinguished_from_program_output(tmp_path: Path) -> None:
    assert bundle.troubles(tmp_path) == ""
    lines = ({"level": "warning", "msg": "no"}, {"level": "error", "msg": "starting sandbox: gone"}, 7)
    (tmp_path / "log").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "no json\n")
    assert bundle.troubles(tmp_path) == "starting sandbox: gone"
