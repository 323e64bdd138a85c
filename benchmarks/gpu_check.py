"""Check every path that CUDA takes with one command on one large GPU: `make gpu-check`.

Needs plain torch and transformers; the model is a random decoder of 0.87 billion parameters in bf16, so nothing is
downloaded. `CHECKS` lists the parts in order, and the module of each describes it: the torch engine (`gpu_engine`), the
torch and JAX trainers (`gpu_trainer`), `pipelinerl check`'s prediction of memory (`memory_prediction`), and checks with
two processes, over NCCL if there are two GPUs (`gpu_mesh`).

Each part runs in a process of its own for at most four minutes; a part that raises, dies or hangs misses its target.
The record, such as gpu_check_h100.json, is written after each part; `--only PART` keeps the recorded results of all
other parts. The exit status is 0 if all targets are met, 1 if a part failed or missed its target, and 3 without a CUDA
device. `--device cpu --quick` rehearses everything but CUDA's own code on a tiny decoder: targets are not judged, and a
record is written only with `--results`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils import logging as transformers_logging

from benchmarks import gpu_engine, gpu_mesh, gpu_trainer, memory_prediction
from benchmarks.gpu_device import FULL, QUICK, Scale, describe, save_model
from benchmarks.measure import RESULTS, Row, print_table, read_record, write_record

Checked = tuple[list[Row], dict[str, Any]]
Check = Callable[[Path, Scale, torch.device], Checked]

CHECKS: Final[Mapping[str, Check]] = {
    "correctness": gpu_engine.check_correctness,
    "parity": gpu_trainer.check_parity,
    "decode": gpu_engine.check_decode,
    "ragged": gpu_engine.check_ragged,
    "continued": gpu_engine.check_continued,
    "staging": gpu_engine.check_staging,
    "update": gpu_engine.check_update,
    "trainer": gpu_trainer.check_throughput,
    "attention": gpu_trainer.check_attention,
    "state": gpu_trainer.check_state,
    "vocabulary": gpu_trainer.check_vocabulary,
    "publication": gpu_trainer.check_publication,
    "memory": memory_prediction.check_memory,
    "group": gpu_mesh.check_group,
    "killed": gpu_mesh.check_killed,
    "mesh": gpu_mesh.check_mesh,
    "jax": gpu_trainer.check_jax,
}
NO_DEVICE: Final = 3
LIMIT_S: Final = 240.0


def attempt(part: str, folder: Path, scale: Scale, device: torch.device) -> Checked:
    """Run one part in this process; any exception counts as a missed target."""
    try:
        return CHECKS[part](folder, scale, device)
    except Exception as error:  # the remaining parts must still run
        traceback.print_exc()
        return failure(part, f"{type(error).__name__}: {error}")


def failure(part: str, text: str) -> Checked:
    """Return the table row and the record entry of a part that failed."""
    return [Row(f"{part} failed", (text.splitlines() or [""])[0][:100], "", False)], {"failed": text}


def apart(part: str, folder: Path, scale: Scale, device: torch.device) -> Checked:
    """Run one part in a process of its own, which is killed with its children after `LIMIT_S`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_part, args=(part, folder, scale, device, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return failure(part, f"no result after {LIMIT_S:g} s; its output is above")
        checked: Checked = ours.recv()
        return checked
    except EOFError:
        process.join()
        return failure(part, f"its process died with exit code {process.exitcode}; its output is above")
    finally:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()  # the process has no group yet, or has ended
        process.join()


def _part(part: str, folder: Path, scale: Scale, device: torch.device, result: Connection) -> None:
    os.setpgid(0, 0)
    transformers_logging.disable_progress_bar()
    result.send(attempt(part, folder, scale, device))


def check(
    device: torch.device,
    scale: Scale,
    chosen: Sequence[str],
    done: Callable[[Mapping[str, Any]], None],
    model: Path | None = None,
) -> Checked:
    """Run the chosen parts one after another on one model directory; call `done` with the results after each part."""
    rows, results = list[Row](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = model or Path(name)
        if model is None:
            save_model(scale, folder)
        for part in chosen:
            began = time.monotonic()
            print(f"gpu_check: {part} …", file=sys.stderr, flush=True)
            more, results[part] = apart(part, folder, scale, device)
            part_s = time.monotonic() - began
            results[part] |= {"part_s": part_s, "missed": [row.name for row in more if row.met is False]}
            rows += more
            done(results)
            print(f"gpu_check: {part} took {part_s:.0f} s", file=sys.stderr, flush=True)
    return rows, results


def run(
    quick: bool = False,
    *,
    only: Sequence[str] = tuple(CHECKS),
    device: str = "cuda",
    results: Path | None = None,
    model: Path | None = None,
) -> int:
    """Check all parts, or those in `only`; print the table, write the record and return the exit status."""
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return NO_DEVICE
    kind, rehearsal = torch.device(device), device == "cpu"
    where = results or (None if rehearsal else RESULTS)
    known = _known(where, describe(kind), quick) if where else {}

    def record(outcomes: Mapping[str, Any]) -> None:
        if where:
            payload = {"quick": quick, "device": describe(kind), "checks": {**known, **outcomes}}
            write_record(record_name(describe(kind)), payload, folder=where)

    rows, outcomes = check(kind, QUICK if quick else FULL, only, record, model)
    failed = any("failed" in result for result in outcomes.values())
    if rehearsal:
        rows = [row if row.name.endswith(" failed") else replace(row, met=None) for row in rows]
        print_table("gpu_check: REHEARSAL on the cpu, which proves nothing about CUDA", rows)
        return int(failed)
    print_table(f"gpu_check on {describe(kind)}", rows)
    missed = sum(row.met is False for row in rows)
    print(f"\n{f'{missed} missed' if missed else 'all targets met'}; recorded in {where}")
    return int(bool(missed))


def record_name(device: str) -> str:
    """Return the name of the record of a device, of which `describe` says "1 x NVIDIA H100 80GB HBM3, 79 GiB"."""
    return "_".join(("gpu_check", *re.findall(r"\b[A-Z]+\d+", device)[:1])).lower()


def _known(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """Return the recorded results of all parts; empty if the record is of another device or scale."""
    record = read_record(record_name(device), folder)
    same = (record.get("device"), record.get("quick")) == (device, quick)
    return dict(record["checks"]) if same else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder and few rounds")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS), help="these parts")
    parser.add_argument("--results", type=Path, help="folder of the record (default: benchmarks/results; cpu: none)")
    parser.add_argument("--model", type=Path, help="a model directory of the check's shape (default: a new one)")
    given = parser.parse_args(arguments)
    return run(given.quick, only=given.only, device=given.device, results=given.results, model=given.model)


if __name__ == "__main__":
    sys.exit(main())
