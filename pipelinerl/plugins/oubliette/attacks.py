"""`ATTACKS`: programs that try to break out of a sandbox; `probe.py` runs them.

An attack prints `ESCAPED …` if it succeeds, or `held` if the sandbox prevents it. A successful attack does no harm: it
sends only signal 0 and changes only files of the probe, and floods and bombs end by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from pipelinerl.plugins.oubliette.runs import Ending, Limits
from pipelinerl.plugins.oubliette.toolchains import COMPILING

#: Limits of attacks that a sandbox prevents immediately. They are generous, since such attacks do not test limits.
QUICK: Final = Limits(
    cpu_s=20, wall_s=60, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: Limits of attacks that never end by themselves.
ENDLESS: Final = Limits(
    cpu_s=0.3, wall_s=0.6, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: Possible endings of programs that loop or sleep.
TIME_IS_UP: Final = frozenset({Ending.CPU_TIME, Ending.DEADLINE, Ending.STARVED})

#: Code that precedes each attack written in Python.
PRELUDE: Final = """\
import ctypes, errno, mmap, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what): os.write(1, f"ESCAPED {what}\\n".encode())
def held(): os.write(1, b"held\\n")
def refused(call, *arguments, what="it was let through"):
    try: got = call(*arguments)
    except (OSError, ValueError, MemoryError, RuntimeError): return held()
    escaped(f"{what}: {got!r}")
def syscall(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "the kernel did it"
def barred(number, *arguments):
    "The filter has to say no before the kernel looks at the arguments."
    try: syscall(number, *arguments)
    except OSError as error:
        return held() if error.errno in (errno.EPERM, errno.ENOSYS) else escaped(f"the kernel was asked: {error}")
    escaped("the kernel did it")
def limited(most, call, what):
    "No more than `most` calls may succeed."
    for _ in range(most + 1):
        try: call()
        except (OSError, MemoryError, RuntimeError): return held()
    escaped(f"{most + 1} {what}")
def start_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program that tries to break out.

    Attributes:
        source: the program; the probe replaces `@PID@`, `@FILE@`, `@PORT@`, `@NAME@`, `@WORD@` by its targets.
        language: `python`, or a compiled language to attack its compiler or to use native code.
        before: a program that runs before the attack, in the same guest.
        ends: endings that show that the sandbox held, even if the program did not print `held`.
        at_start: whether the attack is tried each time that a sandbox is opened.
        needs_namespaces: whether only a tier with namespaces can prevent the attack.
        own_kernel: whether a sandbox with its own kernel may allow the attack, which then does not reach the host.
    """

    name: str
    source: str
    language: str = "python"
    before: str = ""
    limits: Limits = QUICK
    ends: frozenset[Ending] = frozenset()
    at_start: bool = False
    needs_namespaces: bool = False
    own_kernel: bool = False


def _attacks(sources: dict[str, str], **alike: Any) -> list[Attack]:
    """Return attacks, with their sources by name, that are alike in all other fields."""
    return [Attack(name=name, source=source, **alike) for name, source in sources.items()]


_NAMED: Final = "open('/proc/self/comm', 'w').write('oub-@NAME@'[:15])\n"

#: Attacks by processes and time: bombs, loops, ignored signals, leftover daemons, access to other processes.
_OF_PROCESSES: Final = (
    *_attacks({
        "thread bomb": "limited(63, start_thread, 'threads')\nos._exit(0)",
        "vfork bomb by the shell":
            "import subprocess\nlimited(63, lambda: subprocess.Popen(['/bin/sleep', '60']), 'processes')",
    }, ends=frozenset({Ending.MEMORY})),
    *_attacks({
        "endless loop": "while True: pass",
        "endless sleep": "time.sleep(3600)",
        "loop that ignores every signal":
            "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass",
        "stopping itself": "os.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, signal.SIGSTOP)\ntime.sleep(3600)",
        "children that outlive an ended parent":
            "for _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        " + _NAMED
            + "        while True: pass\nwhile True: pass",
        "a timer that interrupts all system calls":
            "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
            "while True: time.sleep(1)",
    }, ends=TIME_IS_UP, limits=ENDLESS),
    *_attacks({
        "loops in children, summed":
            "for _ in range(8):\n    if os.fork() == 0:\n        while True: pass\ntime.sleep(3600)",
        "processor time handed from child to child":
            "while True:\n    if os.fork() == 0:\n        end = time.process_time() + 0.1\n"
            "        while time.process_time() < end: pass\n        os._exit(0)\n    os.wait()",
    }, ends=TIME_IS_UP, limits=replace(ENDLESS, wall_s=5.0)),
    *_attacks({
        "daemon left behind":
            "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        " + _NAMED
            + "        time.sleep(3600)\n    os._exit(0)\nos.wait()",
        "daemon that holds the output":
            "if os.fork() == 0:\n    os.setsid()\n    " + _NAMED + "    while True: time.sleep(0.01)\nos._exit(0)",
    }, ends=frozenset({Ending.EXITED})),
    *_attacks({
        "killing a process of the host": "refused(os.kill, @PID@, 0)",
        "ptrace of a process of the host": "barred(101, 0x4206, @PID@, 0, 0)",
        "more processes": "refused(resource.setrlimit, resource.RLIMIT_NPROC, (resource.RLIM_INFINITY,) * 2)",
    }, at_start=True),
    *_attacks({
        "killing all processes": "refused(os.kill, -1, 0)",
        "handle of a process of the host": "refused(os.pidfd_open, @PID@)",
        "a signal by a file that has an owner":
            "import fcntl\nr, w = os.pipe()\nrefused(fcntl.fcntl, r, fcntl.F_SETOWN, @PID@)",
        "ptrace of its own child": "child = os.fork()\nif child == 0: time.sleep(60)\nbarred(101, 0x4206, child, 0, 0)",
        "memory of another process, read": "barred(310, @PID@, 0, 0, 0, 0, 0)",
        "memory of another process, written": "barred(311, @PID@, 0, 0, 0, 0, 0)",
        "a handle of another's file": "barred(438, 0, 0, 0)",
        "real time": "refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
        "more processor time": "refused(resource.setrlimit, resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)",
        "limits of a process of the host": "refused(resource.prlimit, @PID@, resource.RLIMIT_NOFILE)",
        "more handles": "refused(resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20,) * 2)",
        "processes of others, listed":
            "found = [n for n in os.listdir('/proc') if n.isdigit()]\n"
            "held() if found == ['1'] else escaped(f'{found}')",
    }),
    Attack(
        name="fork bomb", at_start=True, ends=frozenset({Ending.MEMORY}),
        source="limited(63, lambda: os.fork() or time.sleep(60), 'processes')",
    ),
    Attack(
        name="fork bomb that doubles", limits=ENDLESS, ends=TIME_IS_UP | {Ending.MEMORY},
        source="for _ in range(12):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
    ),
    Attack(
        name="killing its group, and the server with it", ends=frozenset({Ending.SIGNALLED, Ending.EXITED}),
        source="signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.killpg(0, signal.SIGKILL)\nheld()",
    ),
    Attack(name="the parent", needs_namespaces=True,
           source="held() if os.getppid() == 0 else escaped(f'parent {os.getppid()}')"),
    Attack(name="going before others", own_kernel=True, source="refused(os.setpriority, os.PRIO_PROCESS, 0, -10)"),
)  # fmt: skip

assert QUICK.processes < 64, "what the bombs count up to"


_TIGHT: Final = replace(QUICK, memory_bytes=64 << 20)
_ENDED: Final = frozenset({Ending.MEMORY, Ending.OUTPUT, *TIME_IS_UP})

#: Attacks on the limits of memory, disk and output.
_ON_LIMITS: Final = (
    *_attacks({
        "memory of many processes, summed":
            "for _ in range(8):\n    if os.fork() == 0: break\nkept = b'x' * (48 << 20)\ntime.sleep(30)\n"
            "escaped('432 MiB')",
        "memory by mapping":
            "refused(lambda: len(bytes(mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))))",
        "stacks of threads": "threading.stack_size(32 << 20)\nlimited(31, start_thread, 'stacks')\nos._exit(0)",
    }, ends=frozenset({Ending.MEMORY}), limits=_TIGHT),
    *_attacks({
        "shared memory that is in no process's pages":
            "refused(mmap.mmap, -1, 1 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)",
        "files in memory": "barred(319, b'x', 0)",
        "secret files in memory": "barred(447, 0)",
        "System V messages": "barred(68, 0, 0o1600)",
        "System V semaphores": "barred(64, 0, 1, 0o1600)",
        "POSIX messages": "barred(240, b'x', 66, 0o600, 0)",
        "locked memory": "barred(151, 3)",
        "memory in extended attributes": "open('a', 'w')\nbarred(188, b'a', b'user.a', b'x' * 60000, 60000, 0)",
        "filling /dev/shm":
            "numbers = iter(range(64))\ndef fill():\n"
            "    with open(f'/dev/shm/{next(numbers)}', 'wb', 0) as file: file.write(b'x' * (1 << 20))\n"
            "limited(17, fill, 'MiB')",
        "files that are deleted and held":
            "files = []\ndef fill():\n    files.append(open('gone', 'wb', 0)); os.unlink('gone')\n"
            "    files[-1].write(b'x' * (1 << 20))\nlimited(17, fill, 'MiB')",
        "a file larger than the disk": "with open('a', 'wb') as file: refused(os.ftruncate, file.fileno(), 1 << 40)",
        "pipes": "limited(128, os.pipe, 'pipes')",
        "writing outside the folder: /x": "refused(open, '/x/x', 'w')",
        "writing outside the folder: /dev": "refused(open, '/dev/x', 'w')",
        "writing outside the folder: /run": "refused(open, '/run/x', 'w')",
        "output that is a link elsewhere": "os.symlink('/dev/stdout', 'out')\nopen('out', 'w').write('held\\n')",
    }),
    *_attacks({
        "shared memory of /dev/zero": "refused(os.open, '/dev/zero', os.O_RDWR)",
        "inodes": "names = map(str, range(999))\nlimited(512, lambda: open(next(names), 'w').close(), 'files')",
        "folders in folders": "limited(512, lambda: (os.mkdir('d'), os.chdir('d')), 'folders')",
    }, own_kernel=True),
    *_attacks({
        "System V shared memory": "barred(29, 0, 1 << 20, 0o1600)",
        "filling the disk":
            "a, b = (open(name, 'wb', 0) for name in 'ab')\n"
            "limited(8, lambda: (a.write(b'x' * (1 << 20)), b.write(b'x' * (1 << 20))), 'times 2 MiB')",
        "writing outside the folder: /": "refused(open, '/x', 'w')",
    }, at_start=True),
    *_attacks({
        "output without end": "for _ in range(4000): os.write(1, b'x' * 65536)\nescaped('250 MiB')",
        "output of children without end":
            "for _ in range(4): os.fork()\nfor _ in range(4000): os.write(1, b'x' * 65536)\nescaped('250 MiB')",
    }, ends=frozenset({Ending.OUTPUT}), limits=replace(QUICK, output_bytes=1 << 16)),
    *_attacks({
        "errors without end": "while True: os.write(2, b'x' * 65536)",
        "output a byte at a time": "while True: os.write(1, b'.'); time.sleep(0.01)",
        "closed output, endless": "os.close(1); os.close(2)\ntime.sleep(3600)",
        "a FIFO without a writer": "os.mkfifo('f')\nopen('f')",
    }, ends=TIME_IS_UP, limits=ENDLESS),
    Attack(
        name="memory of one process", limits=_TIGHT, at_start=True, ends=frozenset({Ending.MEMORY}),
        source="kept = []\nlimited(511, lambda: kept.append(b'x' * (1 << 20)), 'MiB')",
    ),
    Attack(
        name="a stack without end", ends=frozenset({Ending.EXITED, Ending.SIGNALLED, *_ENDED}),
        source="sys.setrecursionlimit(10**9)\ndef deeper(): return [deeper()]\ndeeper()",
    ),
    Attack(
        name="a number without end", limits=replace(_TIGHT, cpu_s=0.5, wall_s=2.0),
        ends=frozenset({Ending.EXITED, *_ENDED}), source="n = 1 << 1000000\nwhile True: n *= n",
    ),
)  # fmt: skip


#: Search for a word in all memory that the process can read, and in every file that it can open. The word is spelled
#: backwards so that the program itself does not contain it.
_SEARCH: Final = """
word, found = bytes(reversed(b'@DROW@')), 0
def times(data):
    at, n = data.find(word), 0
    while at >= 0:
        n += data[at + len(word):at + len(word) + 1] == b'!'
        at = data.find(word, at + 1)
    return n
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in maps.read().splitlines():
        span, rights = line.split()[:2]
        begin, end = (int(part, 16) for part in span.split('-'))
        if 'r' in rights and end - begin < 1 << 28:
            try: memory.seek(begin); found += times(memory.read(end - begin))
            except (OSError, ValueError, OverflowError): pass
for where in ('/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline', '/proc/self/cmdline'):
    found += word in open(where, 'rb').read()
escaped(f'{found} times') if found else held()
"""

#: Attacks that look for data of the host (files, environment, devices, network) or of the preceding run.
_ON_FILES: Final = (
    *_attacks({
        "a file of the host": "refused(open, '@FILE@')",
        "keys": "for name in ('/root/.ssh', '/home', '/var', '/srv', '/opt', '/mnt'): refused(os.listdir, name)",
        "the environment of the first process":
            "text = open('/proc/1/environ', 'rb').read()\nescaped(text[:60]) if b'@WORD@' in text else held()",
        "handles that it was left":
            "left = []\nfor n in range(3, 1024):\n    try: os.fstat(n); left.append(n)\n    except OSError: pass\n"
            "escaped(left) if left else held()",
        "TCP to the host": "refused(lambda: socket.create_connection(('127.0.0.1', @PORT@), 2))",
        "a socket of the host, without a name":
            "def go():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0oub-@NAME@')\nrefused(go)",
    }, at_start=True),
    *_attacks({
        "a file of the host, by the root of a process": "refused(open, '/proc/1/root/@FILE@')",
        "a file of the host, by a link": "os.symlink('@FILE@', 'link')\nrefused(lambda: open('link').read())",
        "a file of the host, by many dots": "refused(open, '../' * 30 + '@FILE@')",
        "a file of the host, by a hard link": "refused(os.link, '@FILE@', 'link')",
        "a file of the host, by its handle": "barred(304, -100, 0, 0)",
        "handles of files": "barred(303, -100, b'/', 0, 0, 0)",
        "passwords": "for name in ('/etc/passwd', '/etc/shadow', '/etc/gshadow'): refused(open, name)",
        "the network's settings": "for name in ('/etc/hosts', '/etc/resolv.conf'): refused(open, name)",
        "writing into the host's programs": "refused(open, '/usr/bin/oubliette-was-here', 'w')",
        "writing into the host's libraries": "refused(open, os.__file__, 'r+')",
        "writing the server's program": "refused(open, '/run/guest/server.py', 'r+')",
        "its own environment": "held() if '@WORD@' not in str(dict(os.environ)) else escaped('it is there')",
        "the environment of a process of the host": "refused(open, '/proc/@PID@/environ', 'rb')",
        "changing what others read":
            "refused(lambda: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x'))\nrefused(os.write, 0, b'x')",
        "settings of the kernel": "refused(open, '/proc/sys/kernel/core_pattern', 'w')",
        "settings of the kernel's network": "refused(open, '/proc/sys/net/ipv4/ip_forward', 'w')",
        "the keys of the kernel's console": "refused(open, '/proc/sysrq-trigger', 'w')",
        "the kernel's memory": "refused(lambda: open('/proc/kcore', 'rb').read(16))",
        "the kernel's messages": "refused(lambda: open('/dev/kmsg', 'rb').read(16))\nbarred(103, 3, 0, 0)",
        "the machine's memory": "refused(open, '/dev/mem', 'rb')",
        "keys of the kernel, in /proc":
            "text = open('/proc/keys').read() if os.path.exists('/proc/keys') else ''\n"
            "escaped(text) if '@WORD@' in text else held()",
        "what the host knows, in memory and environment": _SEARCH,
        "TCP by version 6": "refused(lambda: socket.create_connection(('::1', @PORT@), 2))",
        "UDP": "refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@)))",
        "listening": "refused(lambda: socket.socket().listen())",
        "raw packets":
            "refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\n"
            "refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
        "a socket in a file of the host":
            "def go():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('@FILE@.socket')\nrefused(go)",
        "netlink": "refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "the host of a virtual machine": "refused(socket.socket, 40, socket.SOCK_STREAM)",
        "the kernel's cryptography": "refused(socket.socket, 38, socket.SOCK_SEQPACKET)",
        "a pair of sockets that could reach": "barred(53, 2, 1, 0, (ctypes.c_int * 2)())",
        "names of hosts": "refused(socket.getaddrinfo, 'localhost', 80, 0, 0, 0, socket.AI_ADDRCONFIG)",
        "interfaces beside the loop":
            "names = [l.split(':')[0].strip() for l in open('/proc/net/dev').read().splitlines()[2:]]\n"
            "escaped(names) if set(names) - {'lo'} else held()",
    }),
    *_attacks({
        "the machine's disks":
            "found = [n for n in os.listdir('/dev') if n.startswith(('sd', 'vd', 'nvme', 'loop', 'kvm', 'fuse'))]\n"
            "escaped(found) if found else held()",
        "making a device": "refused(os.mknod, 'disk', 0o60600, os.makedev(254, 0))",
        "a terminal": "refused(open, '/dev/tty')\nrefused(open, '/dev/ptmx')",
        "the bus of devices": "refused(os.listdir, '/sys/class')",
        "control groups": "refused(os.listdir, '/sys/fs/cgroup')",
        "the score by which it is ended":
            "refused(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))",
    }, own_kernel=True),
    Attack(name="files of the run before", at_start=True,
           before="open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')",
           source="found = [n for n in ('/tmp/left', '/dev/shm/left') if os.path.exists(n)]\n"
           "escaped(found) if found else held()"),
    Attack(name="what the run before wrote and read, in memory",
           before="kept = ['@WORD@!' * 3 for _ in range(100)]\nprint(kept, sys.stdin.read())", source=_SEARCH),
    Attack(name="modules that the run before changed",
           before="import json\njson.loads = lambda *_: 'changed'\nimport builtins\nbuiltins.len = lambda *_: 7",
           source="import json\nheld() if json.loads('1') == 1 and len('ab') == 2 else escaped('changed')"),
    Attack(name="processes of the run before",
           before="for _ in range(5):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(3600)",
           source="found = [n for n in os.listdir('/proc') if n.isdigit()]\n"
           "held() if found == ['1'] else escaped(f'{found}')"),
)  # fmt: skip


_IN_TIME: Final = replace(COMPILING, cpu_s=1.0, wall_s=3.0, memory_bytes=256 << 20, output_bytes=1 << 20)
_BOUNDED: Final = frozenset({Ending.EXITED, Ending.MEMORY, Ending.OUTPUT, *TIME_IS_UP})

#: Attacks through privileges and system calls: mounts, namespaces, ids, kernel interfaces.
_OF_THE_KERNEL: Final = (
    *_attacks({
        "mounting": "barred(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
        "a user namespace": "barred(272, 0x10000000)",
        "a user namespace, by clone": "barred(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "being root": "refused(os.setuid, 0)\nrefused(os.setgid, 0)\nrefused(os.setgroups, [0])",
        "rights that it has":
            "status = dict(l.split(':\\t', 1) for l in open('/proc/self/status').read().splitlines() if ':\\t' "
            "in l)\n"
            "bad = [n for n in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb') if int(status.get(n, '0'), 16)]\n"
            "bad += [n for n, v in (('NoNewPrivs', '1'), ('Seccomp', '2')) if status.get(n, v).strip() != v]\n"
            "bad += ['uid'] if os.getuid() == 0 else []\nescaped(bad) if bad else held()",
        "rings of the kernel": "for n in (425, 426, 427): barred(n, 1, 0, 0, 0, 0)",
    }, at_start=True),
    *_attacks({
        "mounting what is there, to write": "barred(165, 0, b'/usr', 0, 0x1000 | 0x20, 0)",
        "mounting by the newer calls": "for n in (428, 429, 430, 432, 433, 442): barred(n, 0, 0, 0, 0, 0)",
        "taking off what covers": "barred(166, b'/proc', 2)",
        "another root": "barred(161, b'/tmp')\nbarred(155, b'/tmp', b'/tmp')",
        "every namespace":
            "for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000, 0x80): barred(272, bit)",
        "a namespace, by clone3": "barred(435, 0, 0)",
        "another's namespace":
            "for name in os.listdir('/proc/self/ns'):\n    file = os.open(f'/proc/self/ns/{name}', os.O_RDONLY)\n"
            "    barred(308, file, 0); os.close(file)",
        "programs that make root":
            "import subprocess\nfor name in ('su', 'mount', 'passwd', 'chsh', 'newgrp'):\n"
            "    path = f'/usr/bin/{name}'\n    if os.path.exists(path):\n"
            "        child = os.posix_spawn('/bin/sh', ['sh', '-c', 'id -u'], {})\n        os.waitpid(child, 0)\n"
            "got = subprocess.run(['/usr/bin/id', '-u'], capture_output=True).stdout.strip()\n"
            "held() if got == b'1000' else escaped(got)",
        "a program of its own that makes root":
            "import shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\n"
            "got = subprocess.run(['./id', '-u'], capture_output=True).stdout.strip()\n"
            "held() if got == b'1000' else escaped(got)",
        "ids of others":
            "refused(os.chown, '.', 0, 0)\n"
            "refused(lambda: os.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1'))",
        "programs in the kernel": "barred(321, 0, 0, 0)",
        "counters of the processor": "barred(298, 0, 0, -1, -1, 0)",
        "faults handled by hand": "barred(323, 0)",
        "keys of the kernel": "for n in (248, 249, 250): barred(n, 0, 0, 0, 0, 0)",
        "modules of the kernel": "for n in (175, 176, 313): barred(n, 0, 0, 0)",
        "another kernel": "for n in (246, 320): barred(n, 0, 0, 0, 0, 0)",
        "ending the machine": "barred(169, 0, 0, 0, 0)",
        "the clock": "barred(164, 0, 0)\nbarred(227, 0, 0)\nbarred(305, 0, 0)\nbarred(159, 0)",
        "the host's name": "barred(170, b'x', 1)\nbarred(171, b'x', 1)",
        "swap": "barred(167, b'/none', 0)\nbarred(168, b'/none')",
        "accounts": "barred(163, 0)\nbarred(179, 0, 0, 0, 0)",
        "ports of the machine": "barred(172, 3)\nbarred(173, 0, 1, 1)",
        "another personality": "barred(135, 0x40000)",
        "tables of segments": "barred(154, 0, 0, 0)",
        "watching every file": "barred(300, 0, 0)",
        "calls that do not exist yet": "for n in (457, 470, 500, 1000): barred(n, 0, 0, 0)",
    }),
    Attack(name="calls by other numbers", ends=frozenset({Ending.SIGNALLED}),
           source="refused(syscall, 0x40000000 + 39)"),
    Attack(name="calls of 32 bits", own_kernel=True, language="c", ends=frozenset({Ending.SIGNALLED}),
           source='#include <stdio.h>\nint main(void){int r;__asm__ volatile("int $0x80":"=a"(r):"a"(20));'
           'printf("ESCAPED %d\\n",r);return 0;}'),
    Attack(name="code in data", language="c", ends=frozenset({Ending.SIGNALLED}),
           source='#include <stdio.h>\n#include <string.h>\nint main(void){char code[16];memset(code,0xc3,16);'
           '((void(*)(void))(void*)code)();puts("ESCAPED ran on the stack");return 0;}'),
)  # fmt: skip

_OF_COMPILERS: Final = (
    *_attacks({
        "compiling a file of the host": '#include "@FILE@"\nint main(void){return 0;}',
        "compiling the passwords": '#include "/etc/shadow"\nint main(void){return 0;}',
        "assembling a file of the host":
            '__asm__(".section .rodata\\nx: .incbin \\"@FILE@\\"");\nint main(void){return 0;}',
        "compiling the environment": '#include "/proc/1/environ"\nint main(void){return 0;}',
    }, ends=frozenset({Ending.EXITED}), language='c'),
    *_attacks({
        "compiling what never ends": '#include "/dev/urandom"\nint main(void){return 0;}',
        "compiling itself": "#include __FILE__\nint main(void){return 0;}",
        "a bomb of macros":
            "#define A(x) x x x x x x x x x x\n#define B(x) A(A(A(A(x))))\nint main(void){return 0;}\n"
            "int a[]={B(B(B(1,)))};",
        "a program as large as the disk": "int a[1<<28]={1};\nint main(void){return a[0];}",
        "an assembly without end": '__asm__(".rept 1000000000\\n.quad 1\\n.endr");\nint main(void){return 0;}',
    }, ends=_BOUNDED, language='c', limits=_IN_TIME),
)  # fmt: skip

#: Every attack on a sandbox.
ATTACKS: Final = (*_OF_PROCESSES, *_ON_LIMITS, *_ON_FILES, *_OF_THE_KERNEL, *_OF_COMPILERS)
