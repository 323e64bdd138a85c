"""Run all attacks on sandboxes as an unprivileged user; print for each tier the attacks that succeeded, as JSON.

Without arguments, the default and the weak sandbox are attacked. With the name of a control group as argument, this
user gets control groups of that name, and the strong sandbox (gVisor) is attacked; the parent removes the groups.
"""

import json
import os
import sys
from pathlib import Path

from pipelinerl.plugins.oubliette import control_groups, probe
from pipelinerl.plugins.oubliette.attacks import ATTACKS
from pipelinerl.plugins.oubliette.runs import SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import isolation_of

NOBODY = 65534
QUICK = [attack for attack in ATTACKS if not attack.ends and attack.language == "python"]


def delegated(name):
    """Return the paths of the control group `name` below this process's own control group, one for each hierarchy."""
    where = control_groups.find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return [] if where is None else [place / name for place in where.places]


def main():
    for group in delegated(sys.argv[1]) if len(sys.argv) > 1 else ():
        group.mkdir()
        (group / "cgroup.procs").write_text("0")
        for path in (group, group / "cgroup.procs"):
            os.chown(path, NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["TMPDIR"] = "/tmp"
    attacks = {Tier.STRONG: ATTACKS} if len(sys.argv) > 1 else {Tier.DEFAULT: ATTACKS, Tier.WEAK: QUICK}
    results = {}
    try:
        for tier, tried in attacks.items():
            found = probe.attacked(lambda number, tier=tier: isolation_of(tier, number), tried)  # type: ignore[misc]
            escaped = [[each.name, each.detail] for each in found if each.defence is probe.Defence.ESCAPED]
            held = sum(each.defence is probe.Defence.HELD for each in found)
            results[tier] = {"held": held, "tried": len(found), "escaped": escaped}
    except (SandboxMissing, SandboxLost) as error:
        results = {"missing": str(error)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
