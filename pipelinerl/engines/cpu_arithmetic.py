"""What a CPU computes in its own instructions, and what it has to imitate: `slow_here`, a sentence for people.

A model in bfloat16 is half as large and may still be many times slower: without AVX512-BF16 or AMX every product is
made of float32 ones, after a conversion of both factors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
#: Any of these flags multiplies pairs of the dtype; Arm names its own `bf16` and `asimdhp`.
_FLAGS: Final = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def slow_here(dtype: str, *, cpuinfo: Path = _CPUINFO) -> str | None:
    """Why an engine on this CPU is slow in `dtype`, and what to say instead; None when it is not, or unknown."""
    wanted, known = _FLAGS.get(dtype), _flags(cpuinfo)
    if wanted is None or not known or wanted & known:
        return None
    return (
        f"this machine's CPU has no instructions for {dtype} and imitates it, many times slower: say "
        "engine.dtype=float32, which takes the same weights"
    )


def _flags(cpuinfo: Path) -> frozenset[str]:
    """The flags of the first CPU; none where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2] for line in lines if line.split(":")[0].strip().lower() in ("flags", "features"))
    return frozenset(next(named, "").split())
