"""Attacks that look for hidden data: files, environment and devices of the host, its network, and the preceding run."""

from __future__ import annotations

from typing import Final

from pipelinerl.verifiers.oubliette.attacks.attack import Attack

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

ATTACKS: Final = (
    Attack(name="a file of the host", source="refused(open, '@FILE@')", at_start=True),
    Attack(name="a file of the host, by the root of a process", source="refused(open, '/proc/1/root/@FILE@')"),
    Attack(name="a file of the host, by a link",
           source="os.symlink('@FILE@', 'link')\nrefused(lambda: open('link').read())"),
    Attack(name="a file of the host, by many dots", source="refused(open, '../' * 30 + '@FILE@')"),
    Attack(name="a file of the host, by a hard link", source="refused(os.link, '@FILE@', 'link')"),
    Attack(name="a file of the host, by its handle", source="barred(304, -100, 0, 0)"),
    Attack(name="handles of files", source="barred(303, -100, b'/', 0, 0, 0)"),
    Attack(name="passwords", source="for name in ('/etc/passwd', '/etc/shadow', '/etc/gshadow'): refused(open, name)"),
    Attack(name="keys",
           source="for name in ('/root/.ssh', '/home', '/var', '/srv', '/opt', '/mnt'): refused(os.listdir, name)",
           at_start=True),
    Attack(name="the network's settings", source="for name in ('/etc/hosts', '/etc/resolv.conf'): refused(open, name)"),
    Attack(name="writing into the host's programs", source="refused(open, '/usr/bin/oubliette-was-here', 'w')"),
    Attack(name="writing into the host's libraries", source="refused(open, os.__file__, 'r+')"),
    Attack(name="writing the server's program", source="refused(open, '/run/guest/server.py', 'r+')"),
    Attack(name="the environment of the first process",
           source="text = open('/proc/1/environ', 'rb').read()\nescaped(text[:60]) if b'@WORD@' in text else held()",
           at_start=True),
    Attack(name="its own environment",
           source="held() if '@WORD@' not in str(dict(os.environ)) else escaped('it is there')"),
    Attack(name="the environment of a process of the host", source="refused(open, '/proc/@PID@/environ', 'rb')"),
    Attack(name="handles that it was left",
           source="left = []\nfor n in range(3, 1024):\n    try: os.fstat(n); left.append(n)\n"
           "    except OSError: pass\n"
           "escaped(left) if left else held()", at_start=True),
    Attack(name="changing what others read",
           source="refused(lambda: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x'))\n"
           "refused(os.write, 0, b'x')"),
    Attack(name="settings of the kernel", source="refused(open, '/proc/sys/kernel/core_pattern', 'w')"),
    Attack(name="settings of the kernel's network", source="refused(open, '/proc/sys/net/ipv4/ip_forward', 'w')"),
    Attack(name="the keys of the kernel's console", source="refused(open, '/proc/sysrq-trigger', 'w')"),
    Attack(name="the kernel's memory", source="refused(lambda: open('/proc/kcore', 'rb').read(16))"),
    Attack(name="the kernel's messages",
           source="refused(lambda: open('/dev/kmsg', 'rb').read(16))\nbarred(103, 3, 0, 0)"),
    Attack(name="the machine's memory", source="refused(open, '/dev/mem', 'rb')"),
    Attack(name="the machine's disks", own_kernel=True,
           source="found = [n for n in os.listdir('/dev') if n.startswith(('sd', 'vd', 'nvme', 'loop', 'kvm', "
           "'fuse'))]\n"
           "escaped(found) if found else held()"),
    Attack(name="making a device", own_kernel=True, source="refused(os.mknod, 'disk', 0o60600, os.makedev(254, 0))"),
    Attack(name="a terminal", own_kernel=True, source="refused(open, '/dev/tty')\nrefused(open, '/dev/ptmx')"),
    Attack(name="the bus of devices", own_kernel=True, source="refused(os.listdir, '/sys/class')"),
    Attack(name="control groups", own_kernel=True, source="refused(os.listdir, '/sys/fs/cgroup')"),
    Attack(name="keys of the kernel, in /proc",
           source="text = open('/proc/keys').read() if os.path.exists('/proc/keys') else ''\n"
           "escaped(text) if '@WORD@' in text else held()"),
    Attack(name="the score by which it is ended", own_kernel=True,
           source="refused(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))"),
    # attacks that look for what the preceding run left
    Attack(name="files of the run before", at_start=True,
           before="open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')",
           source="found = [n for n in ('/tmp/left', '/dev/shm/left') if os.path.exists(n)]\n"
           "escaped(found) if found else held()"),
    Attack(name="what the run before wrote and read, in memory",
           before="kept = ['@WORD@!' * 3 for _ in range(100)]\nprint(kept, sys.stdin.read())", source=_SEARCH),
    Attack(name="what the host knows, in memory and environment", source=_SEARCH),
    Attack(name="modules that the run before changed",
           before="import json\njson.loads = lambda *_: 'changed'\nimport builtins\nbuiltins.len = lambda *_: 7",
           source="import json\nheld() if json.loads('1') == 1 and len('ab') == 2 else escaped('changed')"),
    Attack(name="processes of the run before",
           before="for _ in range(5):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(3600)",
           source="found = [n for n in os.listdir('/proc') if n.isdigit()]\n"
           "held() if found == ['1'] else escaped(f'{found}')"),
    Attack(name="TCP to the host", at_start=True,
           source="refused(lambda: socket.create_connection(('127.0.0.1', @PORT@), 2))"),
    Attack(name="TCP by version 6", source="refused(lambda: socket.create_connection(('::1', @PORT@), 2))"),
    Attack(name="UDP",
           source="refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', "
           "@PORT@)))"),
    Attack(name="listening", source="refused(lambda: socket.socket().listen())"),
    Attack(name="raw packets", source="refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\n"
           "refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)"),
    Attack(name="a socket of the host, without a name",
           source="def go():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0oub-@NAME@')\n"
           "refused(go)", at_start=True),
    Attack(name="a socket in a file of the host",
           source="def go():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('@FILE@.socket')\nrefused(go)"),
    Attack(name="netlink", source="refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    Attack(name="the host of a virtual machine", source="refused(socket.socket, 40, socket.SOCK_STREAM)"),
    Attack(name="the kernel's cryptography", source="refused(socket.socket, 38, socket.SOCK_SEQPACKET)"),
    Attack(name="a pair of sockets that could reach", source="barred(53, 2, 1, 0, (ctypes.c_int * 2)())"),
    Attack(name="names of hosts", source="refused(socket.getaddrinfo, 'localhost', 80, 0, 0, 0, socket.AI_ADDRCONFIG)"),
    Attack(name="interfaces beside the loop",
           source="names = [l.split(':')[0].strip() for l in open('/proc/net/dev').read().splitlines()[2:]]\n"
           "escaped(names) if set(names) - {'lo'} else held()"),
)  # fmt: skip
