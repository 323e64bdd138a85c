"""Check that `pipelinerl check` predicts the torch trainer's peak memory within 15 %.

Several decoders (and SmolLM2-135M if models/smollm2 has it) are trained, all parameters or by LoRA, in fp32 and bf16,
with and without gradient checkpointing. The peak is measured by torch's profiler on a CPU, and by
`torch.cuda.max_memory_allocated` on CUDA. The measured step comes after the optimizer's moments exist, and
has two micro-batches, so that the second runs while the first one's gradient is in memory. A copy of the largest
parameter is held meanwhile, as a trainer holds one while it gathers weights.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from benchmarks.gpu_device import Scale
from benchmarks.measure import Row, report
from benchmarks.torch_step import OBJECTIVE, random_batch, trainer_of
from pipelinerl.models.model_shape import read_shape
from pipelinerl.plugins.memory.trainer_memory import TrainerMemory
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.options import MomentDType, OptimizerOptions, StatePlace
from trainer_contract.types import MicroBatch, Precision

SMOLLM2: Final = Path(__file__).parents[1] / "models" / "smollm2"
_TOLERANCE: Final = 0.15
_RATE: Final = 1e-6
#: Variants: all combinations but one of precision, rank of LoRA (0 means no LoRA), and gradient checkpointing.
_VARIANTS: Final = tuple(
    each for each in product(Precision, (0, 16), (False, True)) if each != (Precision.FP32, 16, True)
)
#: Precision and optimizer options of further cases, which train all parameters without checkpointing. On a CPU,
#: optimizer state on the host counts as well.
_STATES: Final = (
    (Precision.FP32, OptimizerOptions(moments=MomentDType.BF16)),
    (Precision.BF16, OptimizerOptions(place=StatePlace.HOST)),
    (Precision.BF16, OptimizerOptions(moments=MomentDType.BF16, place=StatePlace.HOST)),
)


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A model, the tokens of a micro-batch, and how the model is trained."""

    name: str
    path: Path
    tokens: int
    precision: Precision
    rank: int
    checkpointing: bool
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)

    @property
    def label(self) -> str:
        """The case's name in tables."""
        kind = f"LoRA {self.rank}" if self.rank else "whole"
        further = [", checkpointing"] if self.checkpointing else []
        if self.optimizer != OptimizerOptions():
            further.append(f", moments {self.optimizer.moments} on the {self.optimizer.place}")
        return f"{self.name}, {kind}, {self.precision}{''.join(further)}, {self.tokens}"


def run(quick: bool = False) -> None:
    """Measure every case, print the table and, unless `quick`, write the record."""
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="pipelinerl-memory-") as folder:
        results = [measured(case, torch.device("cpu")) for case in _cases(Path(folder), quick=quick)]
    rows, title = [_row(each) for each in results], "trainer's peak memory, predicted / measured (and measured)"
    report("memory_prediction", rows, {"tolerance": _TOLERANCE, "cases": results}, quick=quick, title=title)


def check_memory(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare prediction and peak for the model in `folder` on the device; on a CPU, a profiler counts allocations."""
    bf16, host = OptimizerOptions(moments=MomentDType.BF16), OptimizerOptions(place=StatePlace.HOST)
    variants = ((0, False), (0, True), (16, False), (0, True, bf16), (0, True, host))
    cases = [MemoryCase("decoder", folder, scale.trained_tokens, Precision.BF16, *each) for each in variants]
    results = [measured(case, device) for case in cases]
    return [_row(each) for each in results], {"cases": results}


def measured(case: MemoryCase, device: torch.device) -> dict[str, Any]:
    """Predict and measure the case's peak memory in bytes."""
    shape = read_shape(case.path)
    lengths = generator(0, "memory_prediction", case.tokens).integers(64, 448, max(2, case.tokens // 256))
    batch = random_batch(lengths.tolist(), (lengths // 4).tolist(), vocab=shape.vocab)
    options = {"optimizer": asdict(case.optimizer)} | ({"lora": {"rank": case.rank}} if case.rank else {})
    trainer: Any = trainer_of(
        case.path, device, case.precision, gradient_checkpointing=case.checkpointing, options=options
    )
    memory = TrainerMemory(
        shape=shape,
        precision=case.precision,
        tokens=batch.num_tokens,
        trained=int(batch.loss_mask.sum()),
        checkpointing=case.checkpointing,
        rank=case.rank,
        on_gpu=device.type == "cuda",
        wire=shape.dtype,
        moments=case.optimizer.moments,
        place=case.optimizer.place,
    )
    peak = _peak(trainer, batch, device)
    predicted = memory.total + (memory.host if device.type == "cpu" else 0)  # on a CPU, memory of the host counts too
    print(f"{case.label}: {predicted / peak:.3f}", file=sys.stderr, flush=True)
    trainer.close()
    del trainer
    gc.collect()
    outcome = {"case": case.label, "predicted": predicted, "measured": peak, "ratio": predicted / peak}
    return outcome | {"parts": dict(memory.parts)}


def _peak(trainer: Any, batch: MicroBatch, device: torch.device) -> int:
    def step() -> None:
        held = [array for _, array in trainer.gather_weights() if array.numel() == largest]
        trainer.backward([batch, batch], OBJECTIVE)
        trainer.optimizer_step(learning_rate=_RATE)
        held.clear()

    largest = max(int(np.prod(info.shape)) for info in trainer.weight_layout())
    step()  # the first step creates the optimizer's moments
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return int(torch.cuda.max_memory_allocated())
    standing = _standing(trainer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    return standing + int(np.cumsum([each.nbytes() for each in events]).max())


def _standing(trainer: Any) -> int:
    """Return the bytes of weights and optimizer state, allocated before the profiled step and so not counted in it."""
    worker = trainer._worker
    moments = [each for state in worker.optimizer.state.values() for each in state.values()]
    tensors = [*worker.own.values(), *worker.masters.values(), *worker.trained.values(), *moments]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _cases(folder: Path, *, quick: bool) -> Iterator[MemoryCase]:
    tokens = 1024 if quick else 2048
    for name, config in _configs().items():
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder / name)
        for variant in _VARIANTS[: 3 if quick else None]:
            yield MemoryCase(name, folder / name, tokens, *variant)
        for precision, optimizer in _STATES:
            yield MemoryCase(name, folder / name, tokens, precision, 0, False, optimizer)
    if not quick and (SMOLLM2 / "model.safetensors").is_file():
        for variant in _VARIANTS[:3]:  # only variants that a CPU measures within minutes
            yield MemoryCase("SmolLM2-135M", SMOLLM2, 512, *variant)


def _configs() -> Mapping[str, PreTrainedConfig]:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    return {
        "llama": LlamaConfig(vocab_size=8192, **sizes),
        "qwen3": Qwen3Config(vocab_size=4096, head_dim=32, tie_word_embeddings=True, **sizes),
        "gpt2": GPT2Config(vocab_size=4096, n_embd=256, n_layer=6, n_head=8, bos_token_id=0, eos_token_id=0),
    }


def _row(result: Mapping[str, Any]) -> Row:
    ratio, mib = result["ratio"], result["measured"] / 2**20
    return Row(result["case"], f"{ratio:.3f} ({mib:,.0f} MiB)", "0.85 to 1.15", abs(ratio - 1) <= _TOLERANCE)
