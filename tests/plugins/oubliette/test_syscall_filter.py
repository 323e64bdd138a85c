"""The sandbox's system call filter (a BPF program), interpreted by the test, denies exactly the calls in its table."""

import struct

from pipelinerl.plugins.oubliette import syscall_filter

X86_64, I386 = 0xC000003E, 0x40000003
ALLOWED, KILLED, REFUSED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
READ, MMAP, SOCKET, SOCKETPAIR, CLONE, CLONE3, UNSHARE, MOUNT, FORK = 0, 9, 41, 53, 56, 435, 272, 165, 57


def verdict(program, number, *arguments, architecture=X86_64):
    """Return what the kernel does with a call under the filter `program`, by interpreting its BPF instructions."""
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


def in_a_guest(number, *arguments, architecture=X86_64):
    """Return what the kernel does with a sandboxed program's call, to which the filters of program and server apply."""
    programs = syscall_filter.of_servers(), syscall_filter.of_runs()
    verdicts = [verdict(program, number, *arguments, architecture=architecture) for program in programs]
    return min(verdicts, key=[KILLED, REFUSED, UNKNOWN, ALLOWED].index)


def test_system_call_filter_allows_and_denies_the_expected_calls():
    assert in_a_guest(READ) == ALLOWED
    assert [in_a_guest(number) for number in (SOCKET, UNSHARE, MOUNT)] == [REFUSED] * 3
    assert in_a_guest(FORK) == ALLOWED
    assert in_a_guest(READ, architecture=I386) == KILLED
    assert in_a_guest(0x40000000 | READ) == KILLED
    assert in_a_guest(CLONE3) == UNKNOWN
    assert in_a_guest(457) == in_a_guest(1000) == UNKNOWN
    server = syscall_filter.of_servers()
    assert [verdict(server, number) for number in (MOUNT, CLONE)] == [ALLOWED] * 2, "they create guests"
    assert verdict(server, CLONE, 1 << 28 | 17) == ALLOWED
    assert [verdict(server, number) for number in (SOCKET, UNSHARE)] == [REFUSED] * 2


def test_system_call_filter_denies_exactly_the_call_numbers_in_its_table():
    by_argument = {CLONE3}
    refused = set(syscall_filter._REFUSED.values())
    for number in set(range(457)) - by_argument:
        assert in_a_guest(number) == (REFUSED if number in refused | {SOCKETPAIR} else ALLOWED), number


def test_system_call_filter_of_the_weak_sandbox_denies_calls_that_reach_other_processes():
    alone = syscall_filter.alone()
    assert verdict(alone, CLONE, 0x3D0F00) == ALLOWED  # the flags with which libc creates a thread
    assert verdict(alone, CLONE, 17) == REFUSED
    kill, execve, prlimit, pidfd_open, setsid = 62, 59, 302, 434, 112
    assert [verdict(alone, number) for number in (FORK, kill, execve, pidfd_open, setsid)] == [REFUSED] * 5
    fcntl, ioctl = 72, 16
    assert (verdict(alone, fcntl, 0, 8), verdict(alone, fcntl, 0, 15), verdict(alone, fcntl, 0, 3)) == (
        REFUSED, REFUSED, ALLOWED
    )  # fmt: skip
    assert (verdict(alone, ioctl, 0, 0x8901), verdict(alone, ioctl, 0, 0x5401)) == (REFUSED, ALLOWED)
    assert (verdict(alone, prlimit, 0), verdict(alone, prlimit, 1)) == (ALLOWED, REFUSED)


def test_system_call_filter_denies_clone_mmap_and_socketpair_only_with_dangerous_arguments():
    assert in_a_guest(CLONE, 0x3D0F00) == ALLOWED  # the flags with which libc creates a thread
    assert [in_a_guest(CLONE, 1 << bit | 17) for bit in (17, 25, 26, 27, 28, 29, 30)] == [REFUSED] * 7
    private, shared, shared_file = 0x22, 0x21, 0x01
    assert in_a_guest(MMAP, 0, 4096, 3, private) == ALLOWED
    assert in_a_guest(MMAP, 0, 4096, 3, shared_file) == ALLOWED
    assert in_a_guest(MMAP, 0, 4096, 3, shared) == REFUSED
    assert in_a_guest(MMAP, 0, 4096, 3, 0x23) == REFUSED  # flags that include MAP_SHARED_VALIDATE
    assert in_a_guest(SOCKETPAIR, 1, 1, 0) == ALLOWED
    assert in_a_guest(SOCKETPAIR, 2, 1, 0) == REFUSED
