"""Attacks through privileges and system calls: mounts, namespaces, ids, kernel interfaces; and attacks on compilers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl.verifiers.oubliette.attacks.attack import TIME_IS_UP, Attack
from pipelinerl.verifiers.oubliette.runs import Ending
from pipelinerl.verifiers.oubliette.toolchains import COMPILING

_IN_TIME: Final = replace(COMPILING, cpu_s=1.0, wall_s=3.0, memory_bytes=256 << 20, output_bytes=1 << 20)
_BOUNDED: Final = frozenset({Ending.EXITED, Ending.MEMORY, Ending.OUTPUT, *TIME_IS_UP})

_OF_THE_KERNEL: Final = (
    Attack(name="mounting", source="barred(165, b'none', b'/tmp', b'tmpfs', 0, 0)", at_start=True),
    Attack(name="mounting what is there, to write", source="barred(165, 0, b'/usr', 0, 0x1000 | 0x20, 0)"),
    Attack(name="mounting by the newer calls",
           source="for n in (428, 429, 430, 432, 433, 442): barred(n, 0, 0, 0, 0, 0)"),
    Attack(name="taking off what covers", source="barred(166, b'/proc', 2)"),
    Attack(name="another root", source="barred(161, b'/tmp')\nbarred(155, b'/tmp', b'/tmp')"),
    Attack(name="a user namespace", source="barred(272, 0x10000000)", at_start=True),
    Attack(name="every namespace",
           source="for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000, "
           "0x80): barred(272, bit)"),
    Attack(name="a user namespace, by clone", source="barred(56, 0x10000000 | 17, 0, 0, 0, 0)", at_start=True),
    Attack(name="a namespace, by clone3", source="barred(435, 0, 0)"),
    Attack(name="another's namespace",
           source="for name in os.listdir('/proc/self/ns'):\n    file = os.open(f'/proc/self/ns/{name}', os.O_RDONLY)\n"
           "    barred(308, file, 0); os.close(file)"),
    Attack(name="being root",
           source="refused(os.setuid, 0)\nrefused(os.setgid, 0)\nrefused(os.setgroups, [0])", at_start=True),
    Attack(name="rights that it has",
           source="status = dict(l.split(':\\t', "
           "1) for l in open('/proc/self/status').read().splitlines() if ':\\t' in l)\n"
           "bad = [n for n in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb') if int(status.get(n, '0'), 16)]\n"
           "bad += [n for n, v in (('NoNewPrivs', '1'), ('Seccomp', '2')) if status.get(n, v).strip() != v]\n"
           "bad += ['uid'] if os.getuid() == 0 else []\nescaped(bad) if bad else held()", at_start=True),
    Attack(name="programs that make root",
           source="import subprocess\nfor name in ('su', 'mount', 'passwd', 'chsh', 'newgrp'):\n"
           "    path = f'/usr/bin/{name}'\n    if os.path.exists(path):\n"
           "        child = os.posix_spawn('/bin/sh', ['sh', '-c', 'id -u'], {})\n        os.waitpid(child, 0)\n"
           "got = subprocess.run(['/usr/bin/id', '-u'], capture_output=True).stdout.strip()\n"
           "held() if got == b'1000' else escaped(got)"),
    Attack(name="a program of its own that makes root",
           source="import shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\n"
           "got = subprocess.run(['./id', '-u'], capture_output=True).stdout.strip()\n"
           "held() if got == b'1000' else escaped(got)"),
    Attack(name="ids of others",
           source="refused(os.chown, '.', 0, 0)\nrefused(lambda: os.write(os.open('/proc/self/uid_map', "
           "os.O_WRONLY), b'0 0 1'))"),
    Attack(name="programs in the kernel", source="barred(321, 0, 0, 0)"),
    Attack(name="counters of the processor", source="barred(298, 0, 0, -1, -1, 0)"),
    Attack(name="faults handled by hand", source="barred(323, 0)"),
    Attack(name="rings of the kernel", source="for n in (425, 426, 427): barred(n, 1, 0, 0, 0, 0)", at_start=True),
    Attack(name="keys of the kernel", source="for n in (248, 249, 250): barred(n, 0, 0, 0, 0, 0)"),
    Attack(name="modules of the kernel", source="for n in (175, 176, 313): barred(n, 0, 0, 0)"),
    Attack(name="another kernel", source="for n in (246, 320): barred(n, 0, 0, 0, 0, 0)"),
    Attack(name="ending the machine", source="barred(169, 0, 0, 0, 0)"),
    Attack(name="the clock", source="barred(164, 0, 0)\nbarred(227, 0, 0)\nbarred(305, 0, 0)\nbarred(159, 0)"),
    Attack(name="the host's name", source="barred(170, b'x', 1)\nbarred(171, b'x', 1)"),
    Attack(name="swap", source="barred(167, b'/none', 0)\nbarred(168, b'/none')"),
    Attack(name="accounts", source="barred(163, 0)\nbarred(179, 0, 0, 0, 0)"),
    Attack(name="ports of the machine", source="barred(172, 3)\nbarred(173, 0, 1, 1)"),
    Attack(name="another personality", source="barred(135, 0x40000)"),
    Attack(name="tables of segments", source="barred(154, 0, 0, 0)"),
    Attack(name="watching every file", source="barred(300, 0, 0)"),
    Attack(name="calls that do not exist yet", source="for n in (457, 470, 500, 1000): barred(n, 0, 0, 0)"),
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
    Attack(name="compiling a file of the host", language="c", ends=frozenset({Ending.EXITED}),
           source='#include "@FILE@"\nint main(void){return 0;}'),
    Attack(name="compiling the passwords", language="c", ends=frozenset({Ending.EXITED}),
           source='#include "/etc/shadow"\nint main(void){return 0;}'),
    Attack(name="assembling a file of the host", language="c", ends=frozenset({Ending.EXITED}),
           source='__asm__(".section .rodata\\nx: .incbin \\"@FILE@\\"");\nint main(void){return 0;}'),
    Attack(name="compiling the environment", language="c", ends=frozenset({Ending.EXITED}),
           source='#include "/proc/1/environ"\nint main(void){return 0;}'),
    Attack(name="compiling what never ends", language="c", limits=_IN_TIME, ends=_BOUNDED,
           source='#include "/dev/urandom"\nint main(void){return 0;}'),
    Attack(name="compiling itself", language="c", limits=_IN_TIME, ends=_BOUNDED,
           source="#include __FILE__\nint main(void){return 0;}"),
    Attack(name="a bomb of macros", language="c", limits=_IN_TIME, ends=_BOUNDED,
           source="#define A(x) x x x x x x x x x x\n#define B(x) A(A(A(A(x))))\n"
           "int main(void){return 0;}\nint a[]={B(B(B(1,)))};"),
    Attack(name="a program as large as the disk", language="c", limits=_IN_TIME, ends=_BOUNDED,
           source="int a[1<<28]={1};\nint main(void){return a[0];}"),
    Attack(name="an assembly without end", language="c", limits=_IN_TIME, ends=_BOUNDED,
           source='__asm__(".rept 1000000000\\n.quad 1\\n.endr");\nint main(void){return 0;}'),
)  # fmt: skip

ATTACKS: Final = (*_OF_THE_KERNEL, *_OF_COMPILERS)
