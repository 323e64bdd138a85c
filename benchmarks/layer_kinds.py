"""Compare the torch engine's decode step of models with states, latents or sinks with that of a Llama.

    llama      attention in all layers, by the engine's own forward
    modules    the same model by transformers' modules, as every other family runs
    lfm2       short convolutions, attention in one layer of four
    qwen3_5    linear attention with a delta rule, attention in one layer of four
    mamba2     state spaces only
    gpt_oss    attention sinks, windows and experts
    deepseek   latent attention

An arm measures the processor seconds of a step of 16 rows on one thread, after a prompt of 100 tokens that all share.
Target: a step of a model with states and attention takes at most 1.5 times as long as Llama's by modules.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.measure import Row, paired, report
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.forward import ModuleForward
from trainer_contract.types import Device

_ROWS: Final = 16
_PROMPT: Final = 100
_STEPS: Final = 40
_MOST: Final = 1.5
_SIZES: Final = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1}
#: Model type and further settings of each arm.
_ARMS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "llama": ("llama", {}),
    "modules": ("llama", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 16, "head_dim": 32, "state_size": 32, "n_groups": 1}),
    "gpt_oss": ("gpt_oss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": (
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}
_STATES: Final = ("lfm2", "qwen3_5")


def step(folder: Path, arm: str) -> Callable[[], float]:
    """Return a function that measures the processor seconds of a decode step of one arm."""
    kind, settings = _ARMS[arm]
    config = CONFIG_MAPPING[kind](**{**_SIZES, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / arm)
    runner = load_runner(
        EngineOptions(
            model_path=folder / arm, model_id="m", slots=_ROWS, max_waiting=0, context_length=256, device=Device.CPU
        )
    )
    if arm == "modules":
        runner._forward = ModuleForward(runner._model)
    prompt, rows = list(range(1, _PROMPT + 1)), range(_ROWS)
    states = [RowState(row, 1, _PROMPT, noise_key=row, temperature=1.0, top_p=1.0, top_k=0) for row in rows]

    def measure() -> float:
        runner.prefill([Prefill(prompt, rows)])
        runner.place(states)
        runner.decode(_ROWS)
        start = time.process_time()
        for _ in range(_STEPS):
            runner.decode(_ROWS)
        return (time.process_time() - start) / _STEPS

    return measure


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        timings = paired({arm: step(Path(folder), arm) for arm in _ARMS}, rounds=2 if quick else 15)
    rows = [Row("milliseconds of a Llama's step", 1e3 * timings.median("llama"))]
    for arm in list(_ARMS)[1:]:
        ratio = timings.ratio(arm, "llama")
        rows.append(Row(f"{arm} ÷ llama", ratio))
        if arm != "modules":
            of_modules = timings.ratio(arm, "modules")
            met = of_modules.median <= _MOST if arm in _STATES else None
            rows.append(Row(f"{arm} ÷ modules", of_modules, f"<= {_MOST}" if arm in _STATES else "", met))
    report("layer_kinds", rows, timings.as_dict(), quick=quick, title="a decode step by kind of layer")
