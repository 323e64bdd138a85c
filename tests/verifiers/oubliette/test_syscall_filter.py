"""The filter, step by step, beside what it is meant to refuse."""

from __future__ import annotations

import struct

from pipelinerl.verifiers.oubliette import syscall_filter

X86_64, I386 = 0xC000003E, 0x40000003
ALLOWED, KILLED, REFUSED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
READ, MMAP, SOCKET, SOCKETPAIR, CLONE, CLONE3, UNSHARE, MOUNT, FORK = 0, 9, 41, 53, 56, 435, 272, 165, 57


def verdict(program: bytes, number: int, *arguments: int, architecture: int = X86_64) -> int:
    """What the kernel would say: the machine of classic BPF, for the steps that are used."""
    given = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *given)
    held, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == 0x05:
            at += value
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += if_true if holds else if_false


def test_what_goes_through_and_what_does_not() -> None:
    boxed = syscall_filter.boxed()
    assert verdict(boxed, READ) == ALLOWED
    assert [verdict(boxed, number) for number in (SOCKET, UNSHARE, MOUNT)] == [REFUSED] * 3
    assert verdict(boxed, FORK) == ALLOWED
    assert verdict(boxed, READ, architecture=I386) == KILLED
    assert verdict(boxed, 0x40000000 | READ) == KILLED
    assert verdict(boxed, CLONE3) == UNKNOWN
    assert verdict(boxed, 457) == verdict(boxed, 1000) == UNKNOWN


def test_every_number_is_refused_or_not_as_the_table_says() -> None:
    boxed, by_argument = syscall_filter.boxed(), {CLONE3}
    refused = set(syscall_filter._REFUSED.values())
    for number in set(range(457)) - by_argument:
        assert verdict(boxed, number) == (REFUSED if number in refused | {SOCKETPAIR} else ALLOWED), number


def test_one_that_is_alone_starts_and_reaches_nobody() -> None:
    alone = syscall_filter.alone()
    assert verdict(alone, CLONE, 0x3D0F00) == ALLOWED  # a thread's
    assert verdict(alone, CLONE, 17) == REFUSED
    kill, execve, prlimit, pidfd_open, setsid = 62, 59, 302, 434, 112
    assert [verdict(alone, number) for number in (FORK, kill, execve, pidfd_open, setsid)] == [REFUSED] * 5
    fcntl, ioctl = 72, 16
    assert (verdict(alone, fcntl, 0, 8), verdict(alone, fcntl, 0, 15), verdict(alone, fcntl, 0, 3)) == (
        REFUSED, REFUSED, ALLOWED
    )  # fmt: skip
    assert (verdict(alone, ioctl, 0, 0x8901), verdict(alone, ioctl, 0, 0x5401)) == (REFUSED, ALLOWED)
    assert (verdict(alone, prlimit, 0), verdict(alone, prlimit, 1)) == (ALLOWED, REFUSED)


def test_what_depends_on_arguments() -> None:
    boxed = syscall_filter.boxed()
    assert verdict(boxed, CLONE, 0x3D0F00) == ALLOWED  # a thread's
    assert [verdict(boxed, CLONE, 1 << bit | 17) for bit in (17, 25, 26, 27, 28, 29, 30)] == [REFUSED] * 7
    private, shared, shared_file = 0x22, 0x21, 0x01
    assert verdict(boxed, MMAP, 0, 4096, 3, private) == ALLOWED
    assert verdict(boxed, MMAP, 0, 4096, 3, shared_file) == ALLOWED
    assert verdict(boxed, MMAP, 0, 4096, 3, shared) == REFUSED
    assert verdict(boxed, MMAP, 0, 4096, 3, 0x23) == REFUSED  # MAP_SHARED_VALIDATE
    assert verdict(boxed, SOCKETPAIR, 1, 1, 0) == ALLOWED
    assert verdict(boxed, SOCKETPAIR, 2, 1, 0) == REFUSED
