"""Attacks on the limits of memory, disk and output: memory used in one process, in many processes together, shared,
hidden from accounting, or without bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl.verifiers.oubliette.attacks.attack import ENDLESS, QUICK, TIME_IS_UP, Attack
from pipelinerl.verifiers.oubliette.runs import Ending

_TIGHT: Final = replace(QUICK, memory_bytes=64 << 20)
_ENDED: Final = frozenset({Ending.MEMORY, Ending.OUTPUT, *TIME_IS_UP})

ATTACKS: Final = (
    Attack(
        name="memory of one process", limits=_TIGHT, at_start=True, ends=frozenset({Ending.MEMORY}),
        source="kept = []\ntry:\n    for _ in range(512): kept.append(b'x' * (1 << 20))\n"
        "except MemoryError: held()\nelse: escaped('512 MiB')",
    ),
    Attack(
        name="memory of many processes, summed", limits=_TIGHT, ends=frozenset({Ending.MEMORY}),
        source="for _ in range(8):\n    if os.fork() == 0: break\nkept = b'x' * (48 << 20)\ntime.sleep(30)\n"
           "escaped('432 MiB')",
    ),
    Attack(
        name="memory by mapping", limits=_TIGHT, ends=frozenset({Ending.MEMORY}),
        source="refused(lambda: len(bytes(mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))))",
    ),
    Attack(
        name="shared memory that nobody's pages show",
        source="refused(mmap.mmap, -1, 1 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)",
    ),
    Attack(name="shared memory of /dev/zero", own_kernel=True, source="refused(os.open, '/dev/zero', os.O_RDWR)"),
    Attack(name="files in memory", source="barred(319, b'x', 0)"),
    Attack(name="secret files in memory", source="barred(447, 0)"),
    Attack(name="System V shared memory", source="barred(29, 0, 1 << 20, 0o1600)", at_start=True),
    Attack(name="System V messages", source="barred(68, 0, 0o1600)"),
    Attack(name="System V semaphores", source="barred(64, 0, 1, 0o1600)"),
    Attack(name="POSIX messages", source="barred(240, b'x', 66, 0o600, 0)"),
    Attack(name="locked memory", source="barred(151, 3)"),
    Attack(name="memory in extended attributes",
           source="open('a', 'w')\nbarred(188, b'a', b'user.a', b'x' * 60000, 60000, 0)"),
    Attack(
        name="stacks of threads", limits=_TIGHT, ends=frozenset({Ending.MEMORY}),
        source="import threading\nthreading.stack_size(32 << 20)\nn = 0\ntry:\n    while n < 100:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except (RuntimeError, MemoryError): pass\nheld() if n < 32 else escaped(f'{n} stacks')\nos._exit(0)",
    ),
    Attack(
        name="a stack without end", ends=frozenset({Ending.EXITED, Ending.SIGNALLED, *_ENDED}),
        source="sys.setrecursionlimit(10**9)\ndef deeper(): return [deeper()]\ndeeper()",
    ),
    Attack(
        name="a number without end", limits=replace(_TIGHT, cpu_s=0.5, wall_s=2.0),
        ends=frozenset({Ending.EXITED, *_ENDED}), source="n = 1 << 1000000\nwhile True: n *= n",
    ),
    Attack(
        name="filling the disk", at_start=True,
        source="size = 0\ntry:\n    with open('a', 'wb', 0) as a, open('b', 'wb', 0) as b:\n"
           "        for _ in range(64):\n"
        "            size += a.write(b'x' * (1 << 20)) + b.write(b'x' * (1 << 20))\n"
        "except OSError: pass\nheld() if size <= 17 << 20 else escaped(f'{size} bytes')",
    ),
    Attack(
        name="filling /dev/shm",
        source="size = 0\ntry:\n    for n in range(64):\n        with open(f'/dev/shm/{n}', 'wb', 0) as file:\n"
        "            size += file.write(b'x' * (1 << 20))\n"
        "except OSError: pass\nheld() if size <= 17 << 20 else escaped(f'{size} bytes')",
    ),
    Attack(
        name="files that are deleted and held",
        source="size, files = 0, []\ntry:\n    for n in range(64):\n        file = open('gone', 'wb', 0); "
           "os.unlink('gone')\n"
        "        files.append(file); size += file.write(b'x' * (1 << 20))\n"
        "except OSError: pass\nheld() if size <= 17 << 20 else escaped(f'{size} bytes')",
    ),
    Attack(
        name="inodes",
        own_kernel=True,
        source="n = 0\ntry:\n    while n < 5000: open(str(n), 'w').close(); n += 1\n"
        "except OSError: pass\nheld() if n <= 512 else escaped(f'{n} files')",
    ),
    Attack(
        name="folders in folders",
        own_kernel=True,
        source="n = 0\ntry:\n    while n < 5000: os.mkdir('d'); os.chdir('d'); n += 1\n"
        "except OSError: pass\nheld() if n <= 512 else escaped(f'{n} folders')",
    ),
    Attack(name="a file larger than the disk",
           source="with open('a', 'wb') as file: refused(os.ftruncate, file.fileno(), 1 << 40)"),
    Attack(
        name="pipes",
        source="n = 0\ntry:\n    while n < 5000: os.pipe(); n += 1\nexcept OSError: pass\n"
        "held() if n <= 128 else escaped(f'{n} pipes')",
    ),
    Attack(name="writing outside the folder: /", source="refused(open, '/x', 'w')", at_start=True),
    Attack(name="writing outside the folder: /x", source="refused(open, '/x/x', 'w')"),
    Attack(name="writing outside the folder: /dev", source="refused(open, '/dev/x', 'w')"),
    Attack(name="writing outside the folder: /run", source="refused(open, '/run/x', 'w')"),
    Attack(name="output without end", limits=replace(QUICK, output_bytes=1 << 16), ends=frozenset({Ending.OUTPUT}),
           source="for _ in range(4000): os.write(1, b'x' * 65536)\nescaped('250 MiB')"),
    Attack(name="output of children without end", limits=replace(QUICK, output_bytes=1 << 16),
           ends=frozenset({Ending.OUTPUT}),
           source="for _ in range(4): os.fork()\nfor _ in range(4000): os.write(1, b'x' * 65536)\nescaped('250 MiB')"),
    Attack(name="errors without end", limits=ENDLESS, ends=TIME_IS_UP,
           source="while True: os.write(2, b'x' * 65536)"),
    Attack(name="output a byte at a time", limits=ENDLESS, ends=TIME_IS_UP,
           source="while True: os.write(1, b'.'); time.sleep(0.01)"),
    Attack(name="closed output, endless", limits=ENDLESS, ends=TIME_IS_UP,
           source="os.close(1); os.close(2)\ntime.sleep(3600)"),
    Attack(name="a FIFO that nobody opens", limits=ENDLESS, ends=TIME_IS_UP,
           source="os.mkfifo('f')\nopen('f')"),
    Attack(name="output that is a link elsewhere",
           source="os.symlink('/dev/stdout', 'out')\nopen('out', 'w').write('held\\n')"),
)  # fmt: skip
