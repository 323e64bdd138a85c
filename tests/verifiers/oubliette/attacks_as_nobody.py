"""Run all attacks on the default sandbox as an unprivileged user; print the attacks that succeeded as JSON."""

from __future__ import annotations

import json
import os
import sys

from pipelinerl.verifiers.oubliette import probe
from pipelinerl.verifiers.oubliette.attacks import ATTACKS
from pipelinerl.verifiers.oubliette.runs import SandboxLost, SandboxMissing, Tier
from pipelinerl.verifiers.oubliette.sandbox import isolation_of

NOBODY = 65534


def main() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        probe.opened(Tier.DEFAULT, at_once=1).close()
        found = probe.attacked(lambda number: isolation_of(Tier.DEFAULT, number), ATTACKS)
        quick = [attack for attack in ATTACKS if not attack.ends and attack.language == "python"]
        weak = probe.attacked(lambda number: isolation_of(Tier.WEAK, number), quick)
    except (SandboxMissing, SandboxLost) as error:
        print(json.dumps({"missing": str(error)}))
        return
    told, told_weak = (
        [[each.name, each.detail] for each in tier if each.defence is probe.Defence.ESCAPED] for tier in (found, weak)
    )
    print(json.dumps({"tried": len(found), "escaped": told, "escaped_weak": told_weak}))


if __name__ == "__main__":
    sys.exit(main())
