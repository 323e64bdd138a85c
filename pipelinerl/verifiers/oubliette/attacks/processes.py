"""Attacks by processes and time: bombs, loops, ignored signals, leftover daemons, and access to other processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl.verifiers.oubliette.attacks.attack import ENDLESS, QUICK, TIME_IS_UP, Attack
from pipelinerl.verifiers.oubliette.runs import Ending

_NAMED: Final = "open('/proc/self/comm', 'w').write('oub-@NAME@'[:15])\n"

ATTACKS: Final = (
    Attack(
        name="fork bomb", at_start=True, ends=frozenset({Ending.MEMORY}),
        source="n = 0\ntry:\n    while n < 300:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except OSError: pass\nheld() if n < 64 else escaped(f'{n} processes')",
    ),
    Attack(
        name="fork bomb that doubles", limits=ENDLESS, ends=TIME_IS_UP | {Ending.MEMORY},
        source="for _ in range(12):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
    ),
    Attack(
        name="thread bomb", ends=frozenset({Ending.MEMORY}),
        source="import threading\nn = 0\ntry:\n    while n < 500:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nheld() if n < 64 else escaped(f'{n} threads')\nos._exit(0)",
    ),
    Attack(
        name="vfork bomb by the shell", ends=frozenset({Ending.MEMORY}),
        source="import subprocess\nn = 0\ntry:\n    while n < 300:\n"
        "        subprocess.Popen(['/bin/sleep', '60']); n += 1\nexcept OSError: pass\n"
        "held() if n < 64 else escaped(f'{n} processes')",
    ),
    Attack(name="endless loop", source="while True: pass", limits=ENDLESS, ends=TIME_IS_UP),
    Attack(name="endless sleep", source="time.sleep(3600)", limits=ENDLESS, ends=TIME_IS_UP),
    Attack(
        name="loop that ignores every signal", limits=ENDLESS, ends=TIME_IS_UP,
        source="for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, "
           "ValueError): pass\n"
        "while True: pass",
    ),
    Attack(
        name="loops in children, summed", limits=replace(ENDLESS, wall_s=5.0), ends=TIME_IS_UP,
        source="for _ in range(8):\n    if os.fork() == 0:\n        while True: pass\ntime.sleep(3600)",
    ),
    Attack(
        name="processor time handed from child to child", limits=replace(ENDLESS, wall_s=5.0), ends=TIME_IS_UP,
        source="while True:\n    if os.fork() == 0:\n        end = time.process_time() + 0.1\n"
        "        while time.process_time() < end: pass\n        os._exit(0)\n    os.wait()",
    ),
    Attack(
        name="stopping itself", limits=ENDLESS, ends=TIME_IS_UP,
        source="os.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, signal.SIGSTOP)\ntime.sleep(3600)",
    ),
    Attack(
        name="daemon left behind", ends=frozenset({Ending.EXITED}),
        source="if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        " + _NAMED +
        "        time.sleep(3600)\n    os._exit(0)\nos.wait()",
    ),
    Attack(
        name="daemon that holds the output", ends=frozenset({Ending.EXITED}),
        source="if os.fork() == 0:\n    os.setsid()\n    " + _NAMED + "    while True: time.sleep(0.01)\nos._exit(0)",
    ),
    Attack(
        name="children that outlive an ended parent", limits=ENDLESS, ends=TIME_IS_UP,
        source="for _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        " + _NAMED +
        "        while True: pass\nwhile True: pass",
    ),
    Attack(name="killing a process of the host", source="refused(os.kill, @PID@, 0)", at_start=True),
    Attack(name="killing all processes", source="refused(os.kill, -1, 0)"),
    Attack(
        name="killing its group, and the server with it", ends=frozenset({Ending.SIGNALLED, Ending.EXITED}),
        source="signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.killpg(0, signal.SIGKILL)\nheld()",
    ),
    Attack(name="the parent", needs_namespaces=True,
           source="held() if os.getppid() == 0 else escaped(f'parent {os.getppid()}')"),
    Attack(name="handle of a process of the host", source="refused(os.pidfd_open, @PID@)"),
    Attack(name="a signal by a file that has an owner",
           source="import fcntl\nr, w = os.pipe()\nrefused(fcntl.fcntl, r, fcntl.F_SETOWN, @PID@)"),
    Attack(name="ptrace of a process of the host", source="barred(101, 0x4206, @PID@, 0, 0)", at_start=True),
    Attack(
        name="ptrace of its own child",
        source="child = os.fork()\nif child == 0: time.sleep(60)\nbarred(101, 0x4206, child, 0, 0)",
    ),
    Attack(name="memory of another process, read", source="barred(310, @PID@, 0, 0, 0, 0, 0)"),
    Attack(name="memory of another process, written", source="barred(311, @PID@, 0, 0, 0, 0, 0)"),
    Attack(name="a handle of another's file", source="barred(438, 0, 0, 0)"),
    Attack(name="going before others", own_kernel=True, source="refused(os.setpriority, os.PRIO_PROCESS, 0, -10)"),
    Attack(name="real time", source="refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))"),
    Attack(
        name="more processor time",
        source="refused(resource.setrlimit, resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)",
    ),
    Attack(
        name="more processes", at_start=True,
        source="refused(resource.setrlimit, resource.RLIMIT_NPROC, (resource.RLIM_INFINITY,) * 2)",
    ),
    Attack(
        name="limits of a process of the host",
        source="refused(resource.prlimit, @PID@, resource.RLIMIT_NOFILE)",
    ),
    Attack(name="more handles", source="refused(resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20,) * 2)"),
    Attack(
        name="processes of others, listed",
        source="found = [n for n in os.listdir('/proc') if n.isdigit()]\n"
        "held() if found == ['1'] else escaped(f'{found}')",
    ),
    Attack(name="an alarm for everybody", limits=ENDLESS, ends=TIME_IS_UP,
           source="signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
           "while True: time.sleep(1)"),
)  # fmt: skip

assert QUICK.processes < 64, "what the bombs count up to"
