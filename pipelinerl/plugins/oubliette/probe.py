"""Tests of a sandbox: `opened` tries some attacks on each new sandbox before it is used; `attacked` tries the
attacks that its caller gives.

The sandbox passes a test if the attack does not succeed, and either prints `held` or ends in an expected way
(`Attack.ends`). An attack that could not be tried is reported as left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.attacks import ATTACKS, PRELUDE, QUICK, Attack
from pipelinerl.plugins.oubliette.runs import Ending, Limits, ProgramResult, Run, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
from pipelinerl.plugins.oubliette.slot import Isolation
from pipelinerl.verifiers.worker_pool import num_cores

#: Maximum number of retries of an attack whose run got too little processor time.
_TRIES: Final = 5
#: Seconds within which the kernel must end the remaining processes of a guest that has ended.
_LEFT_BEHIND_S: Final = 60.0
#: Matches the end of a traceback by which the weak tier stops an attack: no /proc, no writing, no child processes.
_REFUSED: Final = re.compile(rb"\n(PermissionError|FileNotFoundError|BlockingIOError): \[Errno [0-9]+\][^\n]*\n$")
#: Text that a password file would contain.
_PASSWORDS: Final = b"root:"


class Defence(Enum):
    """Result of an attack: the sandbox stopped it, it succeeded, or it could not be tried."""

    HELD = "held"
    ESCAPED = "ESCAPED"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Finding:
    """One attack and its result."""

    name: str
    defence: Defence
    detail: str


def opened(tier: Tier, *, at_once: int | None = None, isolation: Callable[[int], Isolation] | None = None) -> Sandbox:
    """Open a sandbox and try some attacks on it; the caller must close it.

    Raises `SandboxMissing` unless the sandbox can run programs and stops all these attacks.
    """
    around = isolation or (lambda number: isolation_of(tier, number))
    sandbox = Sandbox(around, at_once=at_once or num_cores())
    try:
        honest = sandbox.run(_python("print(6 * int(input()))", b"7\n", QUICK))
        if not honest.succeeded or honest.stdout != b"42\n":
            raise SandboxMissing(f"the {tier} sandbox cannot run programs here: {honest.describe()}")
        findings = attacked(around, [attack for attack in ATTACKS if attack.at_start], sandbox=sandbox)
    except SandboxLost as error:
        sandbox.close()
        raise SandboxMissing(f"the {tier} sandbox is not available here: {error}{_cause()}") from None
    except BaseException:
        sandbox.close()
        raise
    if broken := [f"{each.name}: {each.detail}" for each in findings if each.defence is not Defence.HELD]:
        sandbox.close()
        raise SandboxMissing(f"the {tier} sandbox does not hold here: {'; '.join(broken)}")
    return sandbox


def attacked(
    isolation: Callable[[int], Isolation], attacks: Sequence[Attack], *, sandbox: Sandbox | None = None
) -> list[Finding]:
    """Try the attacks; one that needs a preceding run gets a sandbox with one guest, in which both runs take place."""
    with contextlib.ExitStack() as held:
        baits = held.enter_context(_baits())
        alone = Sandbox(isolation, at_once=1, slots_each=1)
        held.callback(alone.close)
        if sandbox is None:
            sandbox = Sandbox(isolation, at_once=num_cores())
            held.callback(sandbox.close)
        tried = [(attack, alone if attack.before else sandbox) for attack in attacks]
        begun = [_begun(attack, baits, place) for attack, place in tried]
        return [
            _finding(attack, baits, _results(attack, baits, place, first))
            for (attack, place), first in zip(tried, begun, strict=True)
        ] + _left_behind(baits)


# --- one attack -------------------------------------------------------------------------------------------------------


def _begun(attack: Attack, baits: dict[str, str], sandbox: Sandbox) -> Future[ProgramResult] | None:
    """Start an attack in Python, and its preceding run; return None for another language."""
    if attack.language != "python":
        return None
    if attack.before:
        sandbox.submit(_python(_filled(attack.before, baits), f"{baits['WORD']}!".encode(), attack.limits))
    return sandbox.submit(_python(PRELUDE + _filled(attack.source, baits), b"", attack.limits))


def _results(
    attack: Attack, baits: dict[str, str], sandbox: Sandbox, first: Future[ProgramResult] | None
) -> list[ProgramResult] | str:
    """Return the results of the compiler (for a compiled language) and the attack, or why the attack is skipped."""
    source = _filled(attack.source, baits)
    if first is not None:
        result = first.result()
        for _ in range(_TRIES):
            if result.ending is not Ending.STARVED or Ending.STARVED in attack.ends:
                break
            result = sandbox.run(_python(PRELUDE + source, b"", attack.limits))
        return [result]
    try:
        language = toolchains.find(attack.language)
        limits = attack.limits if attack.limits is not QUICK else toolchains.COMPILING
        compiling = language.compiling(source, limits)
        assert compiling is not None, "attacks in compiled languages are compiled"
        result = sandbox.run(compiling)
    except toolchains.ToolchainMissing as error:
        return str(error)
    return [result, sandbox.run(language.running(result.stdout, b"", QUICK))] if result.succeeded else [result]


def _finding(attack: Attack, baits: dict[str, str], results: list[ProgramResult] | str) -> Finding:
    if isinstance(results, str):
        return Finding(attack.name, Defence.LEFT_OUT, results)
    last = results[-1]
    if last.tier is Tier.STRONG and attack.own_kernel:
        return Finding(attack.name, Defence.LEFT_OUT, f"the {last.tier} sandbox handles it in its own kernel")
    if last.tier is Tier.WEAK and attack.needs_namespaces:
        return Finding(attack.name, Defence.LEFT_OUT, f"the {last.tier} sandbox has no namespaces")
    if last.tier is Tier.WEAK and last.code == 1 and _REFUSED.search(last.stderr):
        return Finding(attack.name, Defence.HELD, last.describe())
    ran = attack.language == "python" or len(results) > 1  # else only the compiler ran
    if b"ESCAPED" in last.stdout and ran:
        claim = last.stdout[last.stdout.index(b"ESCAPED") :].splitlines()[0].decode("utf-8", "replace")
        return Finding(attack.name, Defence.ESCAPED, claim[:200])
    for result in results:
        output = result.stdout + result.stderr
        if baits["WORD"].encode() in output or (attack.language != "python" and _PASSWORDS in output):
            return Finding(attack.name, Defence.ESCAPED, "secret data is in its output")
    if b"held\n" in last.stdout or last.ending in attack.ends:
        return Finding(attack.name, Defence.HELD, last.describe())
    return Finding(attack.name, Defence.ESCAPED, f"it ended unexpectedly: {last.describe()}, {last.stdout[:200]!r}")


def _python(source: str, stdin: bytes, limits: Limits) -> Run:
    return toolchains.find("python").running(source.encode(), stdin, limits)


# --- baits ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _baits() -> Iterator[dict[str, str]]:
    """Yield the targets of attacks: a process, a file, sockets and a secret word of the probe."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oub-")))
        word = hashlib.blake2b(f"{folder} {time.time_ns()}".encode(), digest_size=16).hexdigest()
        name = word[:8]
        folder.chmod(0o755)
        file = folder / "bait"
        file.write_text(f"{word}!\n")
        file.chmod(0o644)
        tcp = stack.enter_context(socket.socket())
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        for address in (f"{file}.socket", f"\0oub-{name}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        # cat reads from a pipe of this process, and therefore ends when this process ends
        process = stack.enter_context(
            subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={"BAIT": word})
        )
        stack.callback(process.kill)
        os.environ["OUBLIETTE_BAIT"] = word
        stack.callback(os.environ.pop, "OUBLIETTE_BAIT", None)
        port = str(tcp.getsockname()[1])
        yield {
            "PID": str(process.pid), "FILE": str(file), "PORT": port, "NAME": name, "WORD": word, "DROW": word[::-1]
        }  # fmt: skip


def _filled(source: str, baits: dict[str, str]) -> str:
    for key, value in baits.items():
        source = source.replace(f"@{key}@", value)
    return source


def _left_behind(baits: dict[str, str]) -> list[Finding]:
    until = time.monotonic() + _LEFT_BEHIND_S
    mine = f"oub-{baits['NAME']}"[:15]
    while pids := [
        pid for pid in os.listdir("/proc") if pid.isdigit() and _content(Path("/proc", pid, "comm")) == mine
    ]:
        if time.monotonic() > until:
            return [Finding("processes left behind", Defence.ESCAPED, ", ".join(pids))]
        time.sleep(0.05)
    return []


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- causes -----------------------------------------------------------------------------------------------------------

_SWITCHES: Final = (
    ("/proc/sys/user/max_user_namespaces", "0", "user namespaces are switched off (sysctl user.max_user_namespaces)"),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "only root may make user namespaces (sysctl kernel.unprivileged_userns_clone)",
    ),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor lets no ordinary program make user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns)",
    ),
)


def _cause() -> str:
    causes = [cause for path, value, cause in _SWITCHES if _content(Path(path)) == value]
    status = _content(Path("/proc/self/status"))
    if "Seccomp:\t2" in status:
        causes.append("this process is in a container whose seccomp profile may forbid namespaces")
    return f" ({'; '.join(causes)})" if causes else ""
