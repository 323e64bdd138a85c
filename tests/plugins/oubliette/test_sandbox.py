"""Programs run in the sandbox's guests (isolated environments): results, limits, and replacement of killed guests."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from pipelinerl.plugins.oubliette import bubblewrap, probe, toolchains
from pipelinerl.plugins.oubliette.runs import Ending, Limits, Run, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
from tests.patience import PATIENCE_S, wait_until

TWICE = {
    "python": "print(2 * int(input()))",
    "cpp": "#include <iostream>\nint main() { long n; std::cin >> n; std::cout << 2 * n << std::endl; }",
    "c": '#include <stdio.h>\nint main(void) { long n; if (scanf("%ld", &n) == 1) printf("%ld\\n", 2 * n); return 0; }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); "
    'println!("{}", 2 * s.trim().parse::<i64>().unwrap()); }',
    "go": 'package main\nimport "fmt"\nfunc main() { var n int; fmt.Scan(&n); fmt.Println(2 * n) }',
    "javascript": 'console.log(2 * parseInt(require("fs").readFileSync("/dev/stdin", "utf8")))',
    "java": "import java.util.*; public class Main { public static void main(String[] a) "
    "{ System.out.println(2 * new Scanner(System.in).nextLong()); } }",
}
LONG = Limits(cpu_s=60, wall_s=120)


def python(source, *, stdin=b"", limits=LONG):
    return toolchains.find("python").running(source.encode(), stdin, limits)


def ended(sandbox, source, **given):
    return sandbox.run(python(source, limits=Limits(**{"cpu_s": 60, "wall_s": 120, **given})))


@pytest.mark.parametrize("name", TWICE)
def test_sandboxed_program_of_each_language_reads_its_input_and_writes_output(sandbox, name):
    try:
        language = toolchains.find(name)
    except toolchains.ToolchainMissing as error:
        pytest.skip(f"left out: {error}")
    program = TWICE[name].encode()
    compiling = language.compiling(TWICE[name], toolchains.COMPILING)
    if compiling is not None:
        compiled = sandbox.run(compiling)
        assert compiled.succeeded, compiled.stderr.decode()
        program = compiled.stdout
    result = sandbox.run(language.running(program, b"21\n", LONG))
    assert (result.stdout, result.ending, result.code) == (b"42\n", Ending.EXITED, 0), result.stderr
    assert result.tier is Tier.DEFAULT


@pytest.mark.parametrize(
    ("source", "stdout", "code"),
    [
        ("import sys\nsys.exit(3)", b"", 3),
        ("print('a', end='')\nexit()", b"a", 0),
        ("import sys\nsys.exit('no')", b"", 1),
        ("print(1)\n1/0", b"1\n", 1),
        ("print(", b"", 1),
        ("import os\nprint('lost', end='')\nos._exit(5)", b"", 5),
        ("import atexit\natexit.register(print, 'last')\nprint('first')", b"first\nlast\n", 0),
        ("import threading\nthreading.Thread(target=print, args=('thread',)).start()", b"thread\n", 0),
        ("print(__name__, __file__)\nimport sys\nprint(sys.argv)", b"__main__ /tmp/main.py\n['/tmp/main.py']\n", 0),
        ("import subprocess\nprint(subprocess.run(['echo', 'x'], capture_output=True).stdout)", b"b'x\\n'\n", 0),
        ("try: import isolation, program\nexcept ImportError: print([n for n in dir() if n[0] != '_'])", b"[]\n", 0),
        ("import os\nprint('LD_BIND_NOW' in os.environ)", b"False\n", 0),
        ("class A: pass\nimport __main__\nprint(__main__.A is A)", b"True\n", 0),
        ("print('é', '\\udcff'.encode('utf-8', 'surrogateescape'))", "é b'\\xff'\n".encode(), 0),
        *(
            (f"import sys\nsys.stderr.write('OSError: guest')\nsys.exit({code})", b"", code)
            for code in (125, 126, 127, 255)
        ),
        ("print(len(str(10**5000)))", b"5001\n", 0),
        ("open('f', 'w').write('x')\nprint(open('/tmp/f').read())", b"x\n", 0),
        ("import multiprocessing.dummy as m\nprint(sum(m.Pool(2).map(abs, [-1, -2])))", b"3\n", 0),
    ],
)
def test_sandboxed_program_ends_with_the_status_and_output_of_plain_python(sandbox, source, stdout, code):
    result = ended(sandbox, source)
    assert (result.ending, result.stdout, result.code) == (Ending.EXITED, stdout, code), result.stderr


def test_traceback_of_a_sandboxed_program_shows_only_its_own_frames(sandbox):
    result = ended(sandbox, "def f():\n    1/0\nf()")
    assert result.stderr.startswith(b'Traceback (most recent call last):\n  File "/tmp/main.py", line 3, in <module>\n')
    assert result.describe() == "exit status 1: ZeroDivisionError: division by zero"


def test_result_of_a_sandboxed_run_names_the_limit_that_it_exceeded(sandbox):
    assert ended(sandbox, "while True: pass", cpu_s=0.2).ending is Ending.CPU_TIME
    assert ended(sandbox, "import time\ntime.sleep(3600)", wall_s=2.0).ending is Ending.DEADLINE
    assert ended(sandbox, "while True: print('x' * 1000)", output_bytes=5000).ending is Ending.OUTPUT
    forks = "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = b'x' * (40 << 20)\ntime.sleep(3600)"
    assert ended(sandbox, forks, memory_bytes=100 << 20).ending is Ending.MEMORY
    assert ended(sandbox, "import ctypes\nctypes.string_at(0)").ending is Ending.SIGNALLED


def test_output_of_a_sandboxed_program_is_kept_up_to_its_limit_plus_one_byte(sandbox):
    assert len(ended(sandbox, "print('x' * 99, end='')", output_bytes=99).stdout) == 99
    result = ended(sandbox, "print('x' * 100, end='')", output_bytes=99)
    assert (len(result.stdout), result.ending) == (100, Ending.OUTPUT)
    assert len(ended(sandbox, "import sys\nsys.stderr.write('x' * 5000)", error_bytes=1000).stderr) == 1001


def test_executable_that_cannot_be_run_in_the_sandbox_counts_as_a_failure_of_the_program(sandbox):
    result = sandbox.run(Run(argv=("/tmp/program",), files=(("program", b"no elf"),), limits=LONG))
    assert (result.ending, result.code) == (Ending.EXITED, 126)


def test_weak_sandbox_runs_only_python():
    try:
        weak = probe.opened(Tier.WEAK, at_once=1)
    except SandboxMissing as error:
        pytest.skip(f"left out: programs in the weak sandbox, since {error}")
    try:
        with pytest.raises(toolchains.ToolchainMissing, match="the weak sandbox runs only Python, not /bin/true"):
            weak.submit(Run(argv=("/bin/true",)))
        result = weak.run(python("import sys, heapq\nprint(2 * int(input()), file=sys.stdout)", stdin=b"4"))
        assert (result.stdout, result.ending, result.tier) == (b"8\n", Ending.EXITED, Tier.WEAK)
    finally:
        weak.close()


def _of_this_process(name):
    """Return the process ids of those descendants of this process that run the command `name`."""
    pids, parents = [], {}
    for stat in (Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdigit()):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        pid, _, comm = head.partition(" (")
        parents[int(pid)] = int(rest.split()[1])
        if comm == name:
            pids.append(int(pid))

    def is_mine(pid):
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return [pid for pid in pids if is_mine(pid)]


def test_sandbox_guest_that_is_killed_is_replaced_and_its_program_is_run_again(sandbox):
    """The guest's process ids are collected before the run, so that the kill may come at any moment of the run."""
    before = set(_of_this_process("bwrap"))
    for _ in range(3):
        alone = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=1)
        try:
            assert alone.run(python("print(1)")).stdout == b"1\n"
            guest = set(_of_this_process("bwrap")) - before
            assert guest
            future = alone.submit(python("import time\ntime.sleep(0.5)\nprint(2)"))
            for pid in guest:
                with contextlib.suppress(ProcessLookupError):  # if one process of a guest is killed, the others end
                    os.kill(pid, signal.SIGKILL)
            assert future.result(PATIENCE_S).stdout == b"2\n"
        finally:
            alone.close()


def test_closing_the_sandbox_ends_running_programs_and_fails_queued_ones(alone):
    before = set(_of_this_process("bwrap"))
    assert alone.run(python("print(1)")).stdout == b"1\n"
    runs = [alone.submit(python("import time\ntime.sleep(3600)")) for _ in range(3)]
    alone.close()
    for run in runs:
        with pytest.raises((SandboxLost, CancelledError)):
            run.result(PATIENCE_S)
    assert set(_of_this_process("bwrap")) <= before
    with pytest.raises(SandboxLost, match="closed"):
        alone.submit(python("print(1)"))


def test_error_for_an_unavailable_programming_language_names_the_language(monkeypatch):
    with pytest.raises(toolchains.ToolchainMissing, match=r"language must be one of python, cpp, .* got 'cobol'"):
        toolchains.find("cobol")
    gone = toolchains.Toolchain(name="gone", aliases=(), tools=("no-such-compiler",), source="a", program="a")
    monkeypatch.setitem(toolchains._BY_ALIAS, "gone", gone)
    with pytest.raises(toolchains.ToolchainMissing, match="gone needs no-such-compiler, which is not installed"):
        toolchains.find("gone")


_SERVICE = """
import sys, time
from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.runs import Limits, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
sandbox = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=2)
print(sandbox.run(toolchains.find("python").running(b"print(1)", b"", Limits())).code, flush=True)
source = b"import os\\nname = input()\\nos.fork()\\nopen('/proc/self/comm', 'w').write(name)\\nwhile True: pass"
run = toolchains.find("python").running(source, sys.argv[1].encode(), Limits(cpu_s=3600, wall_s=3600))
for _ in range(3):
    sandbox.submit(run)
time.sleep(3600)
"""


def _called(name):
    pids = []
    for path in (Path("/proc", pid, "comm") for pid in os.listdir("/proc") if pid.isdigit()):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == name:
                pids.append(path.parent.name)
    return pids


def test_no_sandboxed_program_keeps_running_after_the_sandboxs_process_was_killed(sandbox):
    for number in range(3):
        name = f"oub-{os.getpid()}-{number}"[:15]
        service = subprocess.Popen([sys.executable, "-c", _SERVICE, name], stdout=subprocess.PIPE)
        try:
            assert service.stdout is not None
            assert service.stdout.readline() == b"0\n"
            wait_until(lambda: len(_called(name)) >= 2, "both programs run")  # noqa: B023 - called at once
        finally:
            service.kill()
            service.communicate()
        wait_until(lambda: not _called(name), "all programs have ended")  # noqa: B023 - called at once


def test_long_programs_do_not_block_other_programs_in_the_sandbox(alone):
    """If the sandbox strictly ran one program at a time, three endless programs would block the fourth."""
    endless = [alone.submit(python("while True: pass")) for _ in range(3)]
    assert alone.submit(python("print(1)")).result(PATIENCE_S).stdout == b"1\n"
    assert not any(each.done() for each in endless)


def test_programs_in_the_bin_folder_of_the_home_are_not_used_because_guests_would_see_the_home(tmp_path, monkeypatch):
    """A guest sees the folder above the one with the program. An installation in a folder of its own may be used."""
    for folder in ("bin", "node/bin"):
        tool = tmp_path / folder / f"tool-in-{folder.partition('/')[0]}"
        tool.parent.mkdir(parents=True)
        tool.touch(mode=0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{tmp_path}/node/bin")
    assert toolchains._place("tool-in-bin") is None
    assert toolchains._place("tool-in-node") == tmp_path / "node/bin/tool-in-node"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/tool-in-bin"))
    assert bubblewrap.interpreter() == Path("/usr/bin/python3")
