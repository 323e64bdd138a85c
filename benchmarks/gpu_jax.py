"""The check `jax` of `gpu_check`: compare the JAX trainer and engine on the device with the torch trainer in fp32.

losses      three steps in fp32: losses of the JAX trainer against those of the torch trainer
step        time of a bf16 step of the JAX trainer, divided by the torch trainer's
log-probs   the JAX engine's log-probs of its samples, against the torch trainer's for the same tokens
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks import torch_step
from benchmarks.gpu_device import Scale, wait
from benchmarks.gpu_engine import prompts
from benchmarks.gpu_trainer import random_batch
from benchmarks.measure import Row, paired, seconds_of
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.numerics.causes import mismatch
from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.trainer import Trainer
from trainer_contract.types import Device, Precision, TrainerSpec, WeightDType

_RATE: Final = 1e-6
#: By default, XLA would preallocate three quarters of the GPU's memory and compute fp32 products in TF32.
_SETTINGS: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def check_jax(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare JAX with torch; if JAX is missing or does not find the GPU, report that nothing was checked."""
    os.environ.update(_SETTINGS)
    platform = _platform()
    if platform is None or (platform == "cpu") != (device.type == "cpu"):
        return [Row("JAX trainer and engine", f"not checked: JAX finds {platform or 'no package'}")], {"checked": False}
    losses = {name: _losses(name, folder, scale, device) for name in ("torch", "jax")}
    apart = float(np.abs(losses["torch"] - losses["jax"]).max())
    slower = _step_ratio(folder, scale, device)
    largest = _engine_apart(folder, scale, device)
    rows = [
        Row("JAX trainer fp32, largest |Δ loss| from torch", apart, "<= 1e-3", apart <= 1e-3),
        Row("JAX engine - torch trainer fp32, largest |Δ logp|", largest, "<= 1e-3", largest <= 1e-3),
        Row("    JAX step bf16 / torch's, time", slower),
    ]
    return rows, {"checked": True, "loss_apart": apart, "logprob_apart": largest, "step_over_torch": slower}


def _platform() -> str | None:
    if importlib.util.find_spec("jax") is None:
        return None
    import jax

    return str(jax.default_backend())


def _trainer(name: str, folder: Path, device: torch.device, precision: Precision) -> Trainer:
    from pipelinerl.trainers.jax.trainer import JaxTrainer

    trainer: Trainer = TorchTrainer() if name == "torch" else JaxTrainer()
    trainer.init_worker(TrainerSpec(model_path=folder, device=Device(device.type), precision=precision))
    return trainer


def _losses(name: str, folder: Path, scale: Scale, device: torch.device) -> np.ndarray[Any, np.dtype[np.float64]]:
    trainer, batch, results = _trainer(name, folder, device, Precision.FP32), random_batch(scale), []
    for _ in range(3):
        results.append(trainer.backward([batch], resolve("pipelinerl"))[0].loss)
        trainer.optimizer_step(learning_rate=_RATE)
    trainer.close()
    gc.collect()
    return np.array(results)


def _step_ratio(folder: Path, scale: Scale, device: torch.device) -> float:
    """Return the ratio of median times of a bf16 step, JAX / torch. Steps read results, so JAX's async work counts."""
    batch = random_batch(scale)
    trainers = {name: _trainer(name, folder, device, Precision.BF16) for name in ("torch", "jax")}

    def step(name: str) -> None:
        trainers[name].backward([batch], resolve("pipelinerl"))
        trainers[name].optimizer_step(learning_rate=_RATE)
        wait(device)

    timings = paired({name: seconds_of(partial(step, name)) for name in trainers}, scale.rounds)
    for trainer in trainers.values():
        trainer.close()
    gc.collect()
    return timings.ratio("jax", "torch").median


def _engine_apart(folder: Path, scale: Scale, device: torch.device) -> float:
    """Return the largest log-prob difference between the JAX engine and the torch trainer."""
    from pipelinerl.engines.batching.batching_engine import BatchingEngine
    from pipelinerl.engines.jax.engine import load_runner
    from pipelinerl.engines.options import EngineOptions
    from pipelinerl.models.tiny_decoder import char_tokenizer
    from pipelinerl.models.tokenizer import ChatTokenizer

    count = min(scale.parity_sequences, scale.slots)
    options = EngineOptions(
        model_path=folder,
        model_id="debug",
        max_waiting=count,
        slots=count,
        context_length=scale.prompt + scale.answer // 4,
        device=Device(device.type),
        dtype=WeightDType.FLOAT32,
    )
    engine = BatchingEngine(options, load=lambda: load_runner(options), tokenizer=ChatTokenizer(char_tokenizer(), ()))
    batch = prompts(scale, count, "jax")

    async def answers() -> list[Any]:
        await engine.start()
        requests = [
            ChatCompletionRequest(prompt_token_ids=each, max_tokens=scale.answer // 4, seed=seed, return_token_ids=True)
            for seed, each in enumerate(batch)
        ]
        try:
            return list(await asyncio.gather(*map(engine.complete, requests)))
        finally:
            await engine.close()

    choices = [answer.choices[0] for answer in asyncio.run(answers())]
    ours = [np.array(choice.token_logprobs, np.float32) for choice in choices]
    sequences = [prompt + list(choice.token_ids) for prompt, choice in zip(batch, choices, strict=True)]
    packed = torch_step.packed(sequences, [scale.prompt] * count, ours)
    trainer = _trainer("torch", folder, device, Precision.FP32)
    theirs = trainer.forward([packed])[0][packed.loss_mask]
    trainer.close()
    return mismatch(np.concatenate(ours), theirs).max
