"""Which dtypes a CPU has instructions for, by what the system says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.engines.cpu_arithmetic import slow_here


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", {"bfloat16", "float16"}),
        ("flags\t\t: fpu avx512f avx512_bf16", {"float16"}),
        ("flags : amx_bf16 amx_tile avx512_fp16", set()),
        ("Features\t: fp asimd asimdhp bf16", set()),
        ("model name : flags are not listed", set()),
    ],
)
def test_the_flags_decide(tmp_path: Path, line: str, slow: set[str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\n\nprocessor : 1\nflags : avx512_bf16 avx512_fp16\n")
    found = {dtype for dtype in ("float32", "bfloat16", "float16") if slow_here(dtype, cpuinfo=cpuinfo)}
    assert found == slow
    if found:
        said = slow_here(min(found), cpuinfo=cpuinfo)
        assert said is not None and "say engine.dtype=float32" in said


def test_where_the_system_says_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert slow_here("bfloat16", cpuinfo=tmp_path / "nowhere") is None
