"""The probe attacks a sandbox before it is used: the default sandbox stops every attack, and holes are detected."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.attacks import ATTACKS
from pipelinerl.plugins.oubliette.probe import Defence
from pipelinerl.plugins.oubliette.runs import SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import isolation_of
from pipelinerl.plugins.oubliette.slot import Isolation
from tests.patience import PATIENCE_S

BY_NAME = {attack.name: attack for attack in ATTACKS}


def _default(number):
    return isolation_of(Tier.DEFAULT, number)


def test_default_sandbox_stops_all_attacks(sandbox):
    findings = probe.attacked(_default, ATTACKS, sandbox=sandbox)
    assert [finding for finding in findings if finding.defence is Defence.ESCAPED] == []
    assert sum(finding.defence is Defence.HELD for finding in findings) >= 80


def test_weak_sandbox_stops_the_attacks_that_need_no_namespaces():
    """Attacks that a resource limit stops are not tried, because limits are the same in every tier."""
    tried = [attack for attack in ATTACKS if not attack.ends and attack.language == "python"]
    try:
        probe.opened(Tier.WEAK, at_once=1).close()
    except SandboxMissing as error:
        pytest.skip(f"left out: attacks on the weak sandbox, since {error}")
    findings = probe.attacked(lambda number: isolation_of(Tier.WEAK, number), tried)
    assert [finding for finding in findings if finding.defence is Defence.ESCAPED] == []
    assert {finding.name for finding in findings if finding.defence is Defence.LEFT_OUT} == {"the parent"}


def test_weak_sandbox_is_not_used_if_the_default_sandbox_is_unavailable(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxMissing, match=r"the default sandbox needs bubblewrap, .*: apt install bubblewrap"):
        probe.opened(Tier.DEFAULT)


def test_default_sandbox_of_an_unprivileged_user_stops_all_attacks(sandbox):
    if os.geteuid() != 0:
        pytest.skip("left out: attacks as another user, since this one is not root and they were tried as it")
    program = Path(__file__).with_name("attacks_as_nobody.py")
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    counts = json.loads(ended.stdout)
    if "missing" in counts:
        pytest.skip(f"left out: attacks by a user without rights, since {counts['missing']}")
    assert counts["default"]["escaped"] == counts["weak"]["escaped"] == []
    assert counts["default"]["tried"] >= len(ATTACKS)


HOLES = {
    "no filter": (
        lambda isolation: replace(isolation, filter=b"", servers_filter=b""),
        [
            "System V shared memory",
            "files in memory",
            "shared memory that is in no process's pages",
            "a user namespace",
        ],
    ),
    "a folder of the host": (
        lambda isolation: replace(isolation, command=_with(isolation.command, "--ro-bind", "/var", "/var")),
        ["keys"],
    ),
    "the host's network": (
        lambda isolation: replace(
            isolation,
            filter=b"",
            servers_filter=b"",
            command=tuple(each for each in isolation.command if each != "--unshare-net"),
        ),
        ["TCP to the host", "a socket of the host, without a name"],
    ),
    "a folder that every run may write": (
        lambda isolation: replace(isolation, command=_with(isolation.command, "--perms", "0777", "--tmpfs", "/x")),
        ["writing outside the folder: /x"],
    ),
}


def _with(command, *more):
    end = len(command) - 1 - command[::-1].index("--remount-ro")
    return (*command[:end], *more, *command[end:])


@pytest.mark.parametrize("hole", HOLES)
def test_probe_of_a_sandbox_detects_a_hole_in_its_isolation(sandbox, hole):
    make, names = HOLES[hole]
    findings = probe.attacked(lambda number: make(_default(number)), [BY_NAME[name] for name in names])
    assert [finding.name for finding in findings if finding.defence is Defence.ESCAPED] == names


def test_sandbox_that_does_not_stop_an_attack_is_not_opened(sandbox):
    def unfiltered(number):
        return replace(_default(number), filter=b"", servers_filter=b"")

    with pytest.raises(SandboxMissing, match=r"the default sandbox does not hold here: .*System V shared memory"):
        probe.opened(Tier.DEFAULT, at_once=1, isolation=unfiltered)


def test_error_for_a_sandbox_that_fails_to_start_shows_its_output(tmp_path):
    def broken(_):
        command = ("/bin/sh", "-c", "echo 'No permissions to create a new namespace' >&2; exit 1")
        return Isolation(tier=Tier.DEFAULT, command=command, namespaces=True, outer_id=0, filter=b"")

    with pytest.raises(SandboxMissing, match=r"is not available here: .*No permissions to create a new namespace"):
        probe.opened(Tier.DEFAULT, at_once=1, isolation=broken)
