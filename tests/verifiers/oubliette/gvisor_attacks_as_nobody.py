"""Run all attacks on the strong sandbox (gVisor) as an unprivileged user; print the attacks that succeeded as JSON.

The argument is the name of the control groups that were delegated to this user; the parent process removes them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pipelinerl.verifiers.oubliette import control_groups, probe
from pipelinerl.verifiers.oubliette.attacks import ATTACKS
from pipelinerl.verifiers.oubliette.runs import SandboxLost, SandboxMissing, Tier
from pipelinerl.verifiers.oubliette.sandbox import isolation_of

NOBODY = 65534


def handed_on(name: str) -> list[Path]:
    """Return the paths of the control group `name` below this process's own control group, one for each hierarchy."""
    where = control_groups.find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return [] if where is None else [place / name for place in where.places]


def main() -> None:
    for group in handed_on(sys.argv[1]):
        group.mkdir()
        (group / "cgroup.procs").write_text("0")
        for path in (group, group / "cgroup.procs"):
            os.chown(path, NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["TMPDIR"] = "/tmp"
    try:
        found = probe.attacked(lambda number: isolation_of(Tier.STRONG, number), ATTACKS)
    except (SandboxMissing, SandboxLost) as error:
        print(json.dumps({"missing": str(error)}))
        return
    escaped = [[each.name, each.detail] for each in found if each.defence is probe.Defence.ESCAPED]
    held = sum(each.defence is probe.Defence.HELD for each in found)
    print(json.dumps({"held": held, "tried": len(found), "escaped": escaped}))


if __name__ == "__main__":
    main()
