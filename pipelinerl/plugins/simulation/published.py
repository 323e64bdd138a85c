"""Hardware tables computed from published figures of accelerators and models. Nothing here was measured.

    decode step of n rows   reading the KV caches of all rows, plus the longer of two parts that overlap: reading the
                            weights once, and the arithmetic
    trained token           6 · (parameters + attention) floating-point operations, at the published utilisation
    publication             the weights cross the network to each engine, and are then copied within its memory

Weights and KV cache are bf16. Between devices that share a model, all-reduces take bandwidth; latency is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pipelinerl import rng
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.simulation.hardware import EngineTimes, Hardware, Prices, TrainerTimes, UpdateTimes
from pipelinerl.plugins.simulation.setting import LengthLaw

#: Share of the peak bandwidth that transfers reach, derived from PipelineRL's appendix A.4 (arXiv:2509.19128). A flash
#: is the time in which one GPU at peak FLOPS computes the forward pass of one token. There, 44 H100s, each decoding 192
#: sequences, generate 16.9 tokens per flash, so a decode step takes 192 · 44 / 16.9 = 500 flashes. Reading the weights
#: once at peak bandwidth would take 295 flashes, a share of 0.59.
BANDWIDTH_SHARE: Final = 0.6
#: Share of the peak FLOPS that large matrix products reach in decoding and prefill. It is taken from the trainer's rate
#: r_train in the same appendix: 3 · 26.02 / 128 = 0.61.
ARITHMETIC_SHARE: Final = 0.6
#: Share of device memory for weights and KV cache: vLLM's default.
MEMORY_SHARE: Final = 0.9
#: Bytes per parameter that an Adam step moves: the fp32 weight and two moments are read and written, the gradient is
#: read.
_ADAM_BYTES: Final = 28
_BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Published peaks of one device, per second, and the utilisation that published pre-training runs reach on it.

    Attributes:
        flops: dense bf16 operations.
        bandwidth: bytes to and from device memory.
        link: bytes to devices of the same host or slice, in one direction.
        network: bytes to other hosts.
        utilisation: model FLOPS of training, as a share of `flops`.
        source: where the figures were published.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    utilisation: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a dense decoder with grouped-query attention; widths are number of heads · dimension of a head."""

    parameters: float
    layers: int
    hidden: int
    query_width: int
    kv_width: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return _BF16_BYTES * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_width * _BF16_BYTES


_NVIDIA: Final = "NVIDIA's data sheets (SXM, DGX) and Llama 3's utilisation (arXiv:2407.21783, table 4: 38-43 %)"
ACCELERATORS: Final[Mapping[str, Accelerator]] = {
    "h100": Accelerator(
        flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9, network=50e9, utilisation=0.4, source=_NVIDIA
    ),
    "h200": Accelerator(
        flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9, network=50e9, utilisation=0.4, source=_NVIDIA
    ),
    "v5p": Accelerator(
        flops=459e12,
        memory=95e9,
        bandwidth=2.765e12,
        link=600e9,
        network=6.25e9,
        utilisation=0.65,
        source="Google Cloud's page on TPU v5p and MaxText's utilisation (model tiering, Llama 2 70B: 65.4 %)",
    ),
}
#: Qwen2.5's published configurations, by name.
SIZES: Final[Mapping[str, ModelSize]] = {
    "0.5b": ModelSize(parameters=0.49e9, layers=24, hidden=896, query_width=896, kv_width=128),
    "1.5b": ModelSize(parameters=1.54e9, layers=28, hidden=1536, query_width=1536, kv_width=256),
    "3b": ModelSize(parameters=3.09e9, layers=36, hidden=2048, query_width=2048, kv_width=256),
    "7b": ModelSize(parameters=7.61e9, layers=28, hidden=3584, query_width=3584, kv_width=512),
    "14b": ModelSize(parameters=14.7e9, layers=48, hidden=5120, query_width=5120, kv_width=1024),
    "32b": ModelSize(parameters=32.5e9, layers=64, hidden=5120, query_width=5120, kv_width=1024),
    "72b": ModelSize(parameters=72.7e9, layers=80, hidden=8192, query_width=8192, kv_width=1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedHardware:
    """An accelerator and a model size; `times` computes a hardware table for the devices and batches of a recipe."""

    accelerator: Accelerator
    size: ModelSize
    prices: Prices = field(default_factory=Prices)

    def times(self, *, engine_devices: int, trainer_devices: int, rows: int, context: float) -> Hardware:
        """Return the hardware table: how long decoding, training and weight updates take on the given devices.

        Each engine has `engine_devices` devices, the trainer `trainer_devices`. The decode times are computed for
        batches of `rows` sequences with `context` tokens on average; for smaller batches they are approximate. Raises
        RecipeError if the weights and the KV cache of all rows do not fit into the engine's memory.
        """
        device, size = self.accelerator, self.size
        if rows > (most := self.rows_that_fit(engine_devices=engine_devices, context=context)):
            raise RecipeError(
                f"{rows} rows of {context:.0f} tokens do not fit in {engine_devices} devices with the weights "
                f"({size.weight_bytes / 1e9:.0f} GB; room for {most} rows); lower engine.slots or raise engine.devices"
            )
        bandwidth = BANDWIDTH_SHARE * device.bandwidth * engine_devices
        weights_s = size.weight_bytes / bandwidth
        token_s = 2 * size.parameters / (ARITHMETIC_SHARE * device.flops * engine_devices)
        # two all-reduces per layer; in a ring, each device sends every value twice, except its own part
        reduced = 2 * size.layers * size.hidden * _BF16_BYTES * 2 * (1 - 1 / engine_devices)
        row_s = size.kv_bytes * context / bandwidth + reduced / (BANDWIDTH_SHARE * device.link)
        operations = 6 * (size.parameters + 2 * size.layers * size.query_width * context)
        return Hardware(
            engine=EngineTimes(
                step_s=weights_s, row_s=row_s + max(0.0, token_s - weights_s / rows), prompt_token_s=token_s
            ),
            trainer=TrainerTimes(
                token_s=operations / (device.utilisation * device.flops * trainer_devices),
                optimizer_step_s=_ADAM_BYTES * size.parameters / (BANDWIDTH_SHARE * device.bandwidth * trainer_devices),
            ),
            update=UpdateTimes(
                send_s=size.weight_bytes / (BANDWIDTH_SHARE * device.network * engine_devices), pause_s=2 * weights_s
            ),
            prices=self.prices,
        )

    def rows_that_fit(self, *, engine_devices: int, context: float) -> int:
        """Return how many sequences of `context` tokens fit into memory with the weights; 0 if the weights do not."""
        free = MEMORY_SHARE * self.accelerator.memory * engine_devices - self.size.weight_bytes
        return max(0, int(free / (self.size.kv_bytes * max(1.0, context))))


def published_hardware(name: str) -> PublishedHardware:
    """Return the hardware named `ACCELERATOR:SIZE`, such as `h100:7b`. Raises UserError if either name is unknown."""
    accelerator, _, size = name.partition(":")
    if accelerator not in ACCELERATORS or size not in SIZES:
        raise UserError(
            f"no published table is called {name!r}; give ACCELERATOR:SIZE with {', '.join(ACCELERATORS)} and "
            f"{', '.join(SIZES)}, such as h100:7b, or a file"
        )
    return PublishedHardware(accelerator=ACCELERATORS[accelerator], size=SIZES[size])


def mean_context(lengths: LengthLaw, prompt_tokens: int) -> float:
    """Return how many tokens precede a sampled token on average, estimated from 20,000 lengths."""
    drawn = lengths.draw(rng.generator(0, "published", "context"), 20_000).astype(np.float64)
    return prompt_tokens + float((drawn**2).sum() / (2 * drawn.sum()))
