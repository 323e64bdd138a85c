"""The system calls that a run must not make, as a seccomp program.

Denied are calls for sockets, namespaces, mounts, tracing, and kinds of memory that no limit counts. A denied call fails
with an error, so an honest program can continue. A call by another architecture's numbers (32 bits, x32) kills the
process. Unknown numbers fail with ENOSYS. So does `clone3`, because its flags are in memory that a filter cannot read;
C libraries then fall back to `clone`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from typing import Any, Final

_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X86_64: Final = 0xC000003E
_X32_BIT: Final = 0x40000000
#: Flags of `clone` that create a namespace: mount, cgroup, uts, ipc, user, pid, net. The flag for time (0x80) is
#: not among them, since `clone` reads the lowest byte as a signal.
_NEW_NAMESPACES: Final = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_AF_UNIX: Final = 1
_CLONE_THREAD: Final = 0x10000

#: Number of system call numbers in a group. The filter first chooses a group, then compares the numbers in the group.
_GROUP: Final = 12

#: Highest system call number of Linux 6.6 on x86_64; higher numbers are unknown here.
_LAST_KNOWN: Final = 456

#: Denied system calls, with their numbers on x86_64.
_REFUSED: Final = {
    # calls for sockets; `socketpair` for AF_UNIX is allowed, since it reaches no other process
    "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288,
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "swapon": 167, "swapoff": 168, "quotactl": 179, "quotactl_fd": 443, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "fanotify_init": 300, "fanotify_mark": 301,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "process_mrelease": 448,
    "pidfd_getfd": 438, "kcmp": 312,
    # calls for memory that no limit of a run counts
    "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241, "memfd_create": 319,
    "memfd_secret": 447, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "remap_file_pages": 216,
    "mlock": 149, "mlock2": 325, "mlockall": 151, "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256,
    "move_pages": 279, "set_mempolicy_home_node": 450,
    # calls with a large attack surface that few programs need
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "io_setup": 206, "io_submit": 209, "keyctl": 250, "add_key": 248, "request_key": 249,
    "personality": 135, "vmsplice": 278, "modify_ldt": 154, "uselib": 134, "lookup_dcookie": 212,
    "reboot": 169, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "syslog": 103, "acct": 163, "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305,
    "adjtimex": 159, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "vhangup": 153,
    "sched_setscheduler": 144, "sched_setattr": 314, "sched_setparam": 142, "ioprio_set": 251, "_sysctl": 156,
    "nfsservctl": 180,
}  # fmt: skip
_MMAP, _CLONE, _CLONE3, _SOCKETPAIR, _FORK, _VFORK, _EXECVE, _EXECVEAT, _PRLIMIT = 9, 56, 435, 53, 57, 58, 59, 322, 302
#: Calls that may reach other processes, or create a process; also denied to runs without a process namespace.
_ALONE: Final = (434, 203, 62, 200, 234, 424, 129, 297, 109, 112, 141, _FORK, _VFORK, _EXECVE, _EXECVEAT)

#: Denied calls that the server itself needs to isolate a run, in addition to `clone`.
_TO_MAKE_GUESTS: Final = frozenset({_REFUSED["mount"]})

#: Denied commands of fcntl (72) and ioctl (16), which make a file send signals: F_SETOWN, F_SETOWN_EX; FIOSETOWN,
#: SIOCSPGRP.
_OWNERS: Final = {72: (8, 15), 16: (0x8901, 0x8902)}


def supported() -> bool:
    """Return whether this module knows the system call numbers of this machine."""
    return os.uname().machine == "x86_64"


def of_servers() -> bytes:
    """Return the server's filter, which runs inherit. It allows namespaces by `clone`, and mounts, to isolate runs."""
    return _program(set(_REFUSED.values()) - _TO_MAKE_GUESTS)


def of_runs() -> bytes:
    """Return the additional filter of each run. It is short, because the kernel checks it each time it is installed."""
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_JUMP_EQUAL, _X86_64, 1, 0), _step(_RETURN, _KILL)]
    steps.append(_step(_LOAD, _NUMBER))
    for number in sorted(_TO_MAKE_GUESTS):
        steps += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)]
    return b"".join([*steps, *_no_clone_with(_NEW_NAMESPACES), _step(_RETURN, _ALLOW)])


def alone() -> bytes:
    """Return the filter of runs without namespaces: a single process, which can neither start nor signal another."""
    return _program((*_REFUSED.values(), *_ALONE), clone_may_not=_NEW_NAMESPACES, clone_must=_CLONE_THREAD)


def as_oci() -> dict[str, Any]:
    """Return the denied calls in gVisor's format, without `clone3`.

    `clone3` is left out because the format has one error for all denied calls, whereas C libraries fall back to `clone`
    only on ENOSYS.
    """
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": int(errno.EPERM)}

    def holds(index: int, bits: int) -> list[dict[str, Any]]:
        return [{"index": index, "value": bits, "valueTwo": bits, "op": "SCMP_CMP_MASKED_EQ"}]

    namespaces = [1 << bit for bit in range(32) if _NEW_NAMESPACES >> bit & 1]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            refuse | {"names": sorted(_REFUSED)},
            *(refuse | {"names": ["clone"], "args": holds(0, bit)} for bit in namespaces),
            refuse | {"names": ["mmap"], "args": holds(3, _MAP_SHARED | _MAP_ANONYMOUS)},
            refuse | {"names": ["socketpair"], "args": [{"index": 0, "value": _AF_UNIX, "op": "SCMP_CMP_NE"}]},
        ],
    }


def _program(refused: Iterable[int], *, clone_may_not: int = 0, clone_must: int = 0) -> bytes:
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, _X86_64, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
        _step(_JUMP_AT_LEAST, _LAST_KNOWN + 1, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
        _step(_JUMP_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    steps += _by_number(sorted(set(refused)))
    steps += _no_clone_with(clone_may_not)
    if clone_must:
        must = [_step(_JUMP_ANY_BIT, clone_must, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]
        steps += _by_argument(_CLONE, 0, must)
        itself = [_step(_JUMP_EQUAL, 0, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]
        steps += _by_argument(_PRLIMIT, 0, itself)
        for number, words in _OWNERS.items():
            for word in words:
                steps += _by_argument(number, 1, [_step(_JUMP_EQUAL, word, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)])
    both = _MAP_SHARED | _MAP_ANONYMOUS
    shared = [_step(_AND, both), _step(_JUMP_EQUAL, both, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)]
    steps += _by_argument(_MMAP, 3, shared)
    steps += _by_argument(_SOCKETPAIR, 0, [_step(_JUMP_EQUAL, _AF_UNIX, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)])
    steps.append(_step(_RETURN, _ALLOW))
    return b"".join(steps)


def _no_clone_with(bits: int) -> list[bytes]:
    return _by_argument(_CLONE, 0, [_step(_JUMP_ANY_BIT, bits, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)])


def _by_number(refused: list[int]) -> list[bytes]:
    """Return instructions that deny the sorted call numbers; each call skips most of them by jumps between groups."""
    groups = [refused[begin : begin + _GROUP] for begin in range(0, len(refused), _GROUP)]
    steps: list[bytes] = []
    for number in reversed(range(len(groups))):
        group, later = groups[number], len(steps)
        body = [_step(_JUMP_EQUAL, each, len(group) - at, 0) for at, each in enumerate(group)]
        body += [_step(_JUMP, 1 + later), _step(_RETURN, _ERRNO | errno.EPERM)]
        first = [_step(_JUMP_AT_LEAST, groups[number + 1][0], len(body), 0)] if later else []
        steps = [*first, *body, *steps]
    return steps


def _by_argument(number: int, argument: int, rule: list[bytes]) -> list[bytes]:
    """Return instructions that, for call `number`, apply `rule` to the low 32 bits of one argument.

    They end by loading the call number again, which the following instructions compare.
    """
    body = [_step(_LOAD, 16 + 8 * argument), *rule, _step(_LOAD, _NUMBER)]
    return [_step(_JUMP_EQUAL, number, 0, len(body)), *body]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
