"""What the sandbox costs: trivial programs in it, beside the same ones without it; every output is compared.

    ours      2,000 (Python, input) pairs through `Sandbox`, each with everything that stands around a run
    bare      the same by fork, unshare of every namespace, and exec of an interpreter: isolation without the sandbox
    cold      the same, one `subprocess` each, without isolation

All three have as many at once as there are cores. Then one C++ program, compiled once, on 200 inputs, beside its bare
runs. What is run bare are this file's own programs, never an answer's. Targets: ours ÷ bare at least 0.4 in programs a
second, ours ÷ cold at least 3, 2,000 pairs within 12 s, C++ at most 1.5 times its bare runs; no wrong output.
What C++ takes without any isolation is told as well; and, where there are control groups, processor time: of a cold
subprocess and of whoever starts it, ÷ that of a pair, all of the boxes' processes and this one together. On a machine
that others use, that is the figure; what the kernel does afterwards in threads of its own is in neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Final, final

from benchmarks.measure import Paired, Row, paired, print_table, seconds_of, write_record
from pipelinerl.verifiers.oubliette import bubblewrap, probe, toolchains
from pipelinerl.verifiers.oubliette.runs import Limits, Run, Tier
from pipelinerl.verifiers.oubliette.sandbox import Sandbox

PAIRS: Final = 2000
CPP_TESTS: Final = 200
LEAST_OF_BARE, LEAST_OF_COLD, MOST_S, MOST_CPP = 0.4, 3.0, 12.0, 1.5
_LIMITS: Final = Limits(cpu_s=10.0, wall_s=10.0)
_PROGRAM: Final = "print(2 * int(input()))\n"
_CPP: Final = (
    '#include <cstdio>\nint main() { long n; return std::scanf("%ld", &n) != 1 || std::printf("%ld\\n", 2 * n) < 0; }\n'
)
#: Mount, cgroup, uts, ipc, user, pid, network.
_EVERY_NAMESPACE: Final = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000


def run(quick: bool) -> None:
    """Measure, print the table and write the record."""
    pairs, others, rounds = (100, 50, 2) if quick else (PAIRS, 400, 3)
    cores = len(os.sched_getaffinity(0))
    sandbox = probe.opened(Tier.DEFAULT, at_once=cores)
    wrong = Wrong()
    with (
        tempfile.TemporaryDirectory() as folder,
        get_context("spawn").Pool(cores) as pool,
        ThreadPoolExecutor(cores) as threads,
    ):
        (file := Path(folder) / "main.py").write_text(_PROGRAM)
        interpreter = [str(bubblewrap.interpreter()), "-I", "-S", str(file)]
        shares = [(interpreter, list(range(core, others, cores))) for core in range(cores)]
        processor = Processor(sandbox)

        def ours() -> float:
            language = toolchains.find("python")
            with processor.of("ours", pairs):
                runs = [language.running(_PROGRAM.encode(), b"%d\n" % n, _LIMITS) for n in range(pairs)]
                return pairs / wrong.timed(lambda: _in_sandbox(sandbox, runs))

        def bare() -> float:
            began = time.perf_counter()
            pool.map(bare_runs, shares, chunksize=1)
            return others / (time.perf_counter() - began)

        def cold() -> float:
            with processor.of("cold", others):
                return others / wrong.timed(lambda: list(threads.map(lambda n: _cold(interpreter, n), range(others))))

        timings = paired({"ours": ours, "bare": bare, "cold": cold}, rounds=rounds)
        taken = processor.taken()
        cpp = _cpp(sandbox, threads, pool, Path(folder), wrong, tests=20 if quick else CPP_TESTS, rounds=rounds)
    sandbox.close()
    request_s = pairs / timings.median("ours")
    rows = [
        *_ratio_rows(timings),
        *_processor_rows(taken),
        *(Row(f"pairs/s, {arm}", timings.median(arm)) for arm in ("ours", "bare", "cold")),
        Row(f"{pairs} pairs (s)", request_s, f"<= {MOST_S:g}", request_s <= MOST_S),
        *cpp,
        Row("wrong outputs", wrong.count, "0", wrong.count == 0),
        Row("… of", wrong.seen),
    ]  # fmt: skip
    print_table("oubliette", rows)
    if not quick:
        write_record(
            "oubliette",
            {
                "of_bare": timings.ratio("ours", "bare").as_dict(),
                "of_cold": timings.ratio("ours", "cold").as_dict(),
                "processor_s": None if taken is None else taken.as_dict(),
                "pairs_per_s": {arm: timings.median(arm) for arm in ("ours", "bare", "cold")},
                "request_s": request_s,
                "cpp": {row.name: str(row.value) for row in cpp},
                "wrong": wrong.count,
                "outputs": wrong.seen,
            },
        )


@final
class Wrong:
    """Counts outputs that are not twice their number."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = 0

    def timed(self, work: Callable[[], Sequence[bytes]]) -> float:
        """The seconds that it takes, without the comparing."""
        began = time.perf_counter()
        outputs = work()
        seconds = time.perf_counter() - began
        self.count += sum(output != b"%d\n" % (2 * number) for number, output in enumerate(outputs))
        self.seen += len(outputs)
        return seconds


@final
class Processor:
    """Processor seconds of each piece of an arm's work: of this process, its children and the boxes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._samples: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def of(self, arm: str, pieces: int) -> Iterator[None]:
        """Measure what is done within."""
        before_s = self._now_s()
        yield
        self._samples.setdefault(arm, []).append((self._now_s() - before_s) / pieces)

    def taken(self) -> Paired | None:
        """All but each arm's first, which is its warm-up; None where no control group counts."""
        if self._sandbox.cpu_s() == 0:
            return None
        return Paired({arm: tuple(values[1:]) for arm, values in self._samples.items()})

    def _now_s(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime + self._sandbox.cpu_s()


def _ratio_rows(timings: Paired) -> list[Row]:
    of_bare, of_cold = timings.ratio("ours", "bare"), timings.ratio("ours", "cold")
    return [
        Row("pairs/s ÷ bare fork + unshare + exec", of_bare, f">= {LEAST_OF_BARE}", of_bare.median >= LEAST_OF_BARE),
        Row("pairs/s ÷ one cold subprocess each", of_cold, f">= {LEAST_OF_COLD:g}", of_cold.median >= LEAST_OF_COLD),
    ]


def _processor_rows(taken: Paired | None) -> list[Row]:
    """Processor time of a pair and of a cold subprocess; none where no control group counts it."""
    if taken is None:
        return []
    ratio = taken.ratio("cold", "ours")
    return [
        Row("processor time, one cold subprocess ÷ a pair", ratio, f">= {LEAST_OF_COLD:g}", ratio.low >= LEAST_OF_COLD),
        *(Row(f"processor time, {arm} (ms)", 1000 * taken.median(arm)) for arm in ("ours", "cold")),
    ]


def _in_sandbox(sandbox: Sandbox, runs: Sequence[Run]) -> list[bytes]:
    return [future.result().stdout for future in [sandbox.submit(each) for each in runs]]


def _cold(command: Sequence[str], number: int) -> bytes:
    return subprocess.run(command, input=b"%d\n" % number, capture_output=True, check=True, timeout=60).stdout


def bare_runs(share: tuple[Sequence[str], Sequence[int]]) -> None:
    """Fork, unshare, fork (a namespace of processes holds the children), exec; for each number, one after another."""
    command, numbers = share
    libc = ctypes.CDLL(None, use_errno=True)
    for number in numbers:
        out_read, out_write = os.pipe()
        in_read, in_write = os.pipe()
        os.write(in_write, b"%d\n" % number)
        os.close(in_write)
        first = os.fork()
        if first == 0:
            if libc.unshare(_EVERY_NAMESPACE) != 0:
                os._exit(99)
            second = os.fork()
            if second == 0:
                os.dup2(in_read, 0)
                os.dup2(out_write, 1)
                os.execv(command[0], list(command))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
        os.close(out_write)
        os.close(in_read)
        with open(out_read, "rb") as file:
            output = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        if status != 0 or output != b"%d\n" % (2 * number):
            raise RuntimeError(f"the bare run of {number} ended with {status} and wrote {output!r}")


def _cpp(
    sandbox: Sandbox, threads: ThreadPoolExecutor, pool: Pool, folder: Path, wrong: Wrong, *, tests: int, rounds: int
) -> list[Row]:
    """Seconds of all tests, ours with and without compiling, beside the bare runs of the same program."""
    language = toolchains.find("cpp")
    compiling = language.compiling(_CPP, toolchains.COMPILING)
    assert compiling is not None, "C++ is compiled"
    began = time.perf_counter()
    compiled = sandbox.run(compiling)
    compile_s = time.perf_counter() - began
    if not compiled.succeeded:
        raise RuntimeError(f"the program does not compile: {compiled.stderr.decode()}")
    file = folder / "program"
    file.write_bytes(compiled.stdout)
    file.chmod(0o755)
    runs = [language.running(compiled.stdout, b"%d\n" % n, _LIMITS) for n in range(tests)]
    cores = len(os.sched_getaffinity(0))
    shares = [([str(file)], list(range(core, tests, cores))) for core in range(cores)]
    timings = paired(
        {
            "ours": lambda: wrong.timed(lambda: _in_sandbox(sandbox, runs)),
            "bare": seconds_of(lambda: pool.map(bare_runs, shares, chunksize=1)),
            "plain": lambda: wrong.timed(lambda: list(threads.map(lambda n: _cold([str(file)], n), range(tests)))),
        },
        rounds=rounds,
    )
    ratio = timings.ratio("ours", "bare")
    return [
        Row(f"C++, {tests} tests ÷ bare runs", ratio, f"<= {MOST_CPP:g}", ratio.median <= MOST_CPP),
        Row("C++, compiling, once (s)", compile_s),
        Row(f"C++, {tests} tests (s)", timings.median("ours")),
        Row(f"C++, {tests} bare runs (s)", timings.median("bare")),
        Row(f"C++, {tests} runs without isolation (s)", timings.median("plain")),
    ]
