"""Every path that CUDA takes, checked by one command on one large GPU in some minutes: `make gpu-check`.

Plain torch and transformers, a random decoder of 0.87 billion parameters in bf16; nothing is downloaded. In turn:
correctness, decode rate and in-flight updates of the torch engine (`gpu_engine`), throughput and MFU of the torch
trainer, its parity with the engine and its optimizer's state on the host (`gpu_trainer`), its attention by a kernel and
by buckets (`gpu_attention`), the trainer's peak memory against what `pipelinerl check` predicts (`memory_prediction`),
and a trainer of two processes over NCCL where there are two GPUs (`gpu_mesh`). A check that fails says why and the
others go on.

Exit status: 0 all targets met, 1 something failed or missed its target, 3 there is no CUDA device and nothing was
checked. The record is results/gpu_check.json.

`--device cpu --quick` rehearses everything that is not CUDA's on a tiny decoder. It proves nothing about CUDA: no
target is judged, no record is written.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils import logging as transformers_logging

from benchmarks import gpu_attention, gpu_engine, gpu_mesh, gpu_trainer, memory_prediction
from benchmarks.gpu_device import FULL, QUICK, Scale, describe, save_model
from benchmarks.measure import Row, print_table, write_record
from inference_contract.errors import ContractError
from pipelinerl.errors import PipelineError
from trainer_contract.errors import TrainerError

Check = Callable[[Path, Scale, torch.device], tuple[list[Row], dict[str, Any]]]

CHECKS: Final[Mapping[str, Check]] = {
    "correctness": gpu_engine.check_correctness,
    "parity": gpu_trainer.check_parity,
    "decode": gpu_engine.check_decode,
    "update": gpu_engine.check_update,
    "trainer": gpu_trainer.check_throughput,
    "attention": gpu_attention.check_attention,
    "state": gpu_trainer.check_state,
    "memory": memory_prediction.check_memory,
    "mesh": gpu_mesh.check_mesh,
}
NO_DEVICE: Final = 3

#: What a check may fail with: torch's errors are RuntimeErrors, running out of memory among them.
_FAILURES = (RuntimeError, ValueError, OSError, PipelineError, ContractError, TrainerError)


def check(device: torch.device, scale: Scale, chosen: Sequence[str]) -> tuple[list[Row], dict[str, Any]]:
    """Run the checks one after the other on one model directory; a failed one is a missed row."""
    rows: list[Row] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(scale, folder)
        for kind in chosen:
            began = time.monotonic()
            try:
                more, found[kind] = CHECKS[kind](folder, scale, device)
            except _FAILURES as error:
                text = f"{type(error).__name__}: {error}"
                more, found[kind] = [Row(f"{kind} failed", text.splitlines()[0][:100], "", False)], {"failed": text}
            rows += more
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return rows, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, print, record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, no check")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder and few rounds")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS), help="some of the checks")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return NO_DEVICE
    transformers_logging.disable_progress_bar()
    device, began = torch.device(given.device), time.monotonic()
    rows, found = check(device, QUICK if given.quick else FULL, given.only)
    failed = any("failed" in result for result in found.values())
    if device.type == "cpu":
        rows = [row if row.name.endswith(" failed") else replace(row, met=None) for row in rows]
        print_table("gpu_check: REHEARSAL on the cpu, which proves nothing about CUDA", rows)
        return int(failed)
    minutes = (time.monotonic() - began) / 60
    rows.append(Row("minutes for all of it", minutes, "<= 8", minutes <= 8))
    print_table(f"gpu_check on {describe(device)}", rows)
    missed = [row.name for row in rows if row.met is False]
    path = write_record(
        "gpu_check", {"quick": given.quick, "device": describe(device), "missed": missed, "checks": found}
    )
    print(f"\n{'all targets met' if not missed else f'{len(missed)} missed'}; recorded in {path}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
