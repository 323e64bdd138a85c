"""The torch engine: continuous batching over any Hugging Face causal language model directory, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from inference_contract.engine import Engine
from pipelinerl.config.sections import EngineSection, ModelSection
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.memory_budget import DeviceMemory, EngineBudget, budget_of
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.forward import load_for_decoding, refuse_undecodable, use_page_cache
from pipelinerl.engines.torch.page_cache import CacheShape
from pipelinerl.engines.torch.quantized import QuantizedWeights
from pipelinerl.engines.torch.runner import TorchRunner, cache_shape_of, served_weights
from pipelinerl.engines.torch.speculation import length_of
from pipelinerl.engines.torch.weights import TorchWeights
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.errors import ModelError
from pipelinerl.models import torch_miniature
from pipelinerl.models.context_limit import rotary_limit
from pipelinerl.models.model_shape import CacheBytes, read_shape
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.torch_miniature import Computed, texts_of
from pipelinerl.numerics import torch_attention as kernels_of_torch, torch_batch_invariant, torch_logprobs
from trainer_contract.types import Device, HeadPrecision, Kernels

#: Number of tokens that a trial of the engine decodes, and its longest sequence, more than a block of the cache.
_DECODED: Final = 4
_LONGEST: Final = 44


def from_options(options: EngineOptions) -> Engine:
    """Return the engine that a recipe describes; its `start` loads the model. Raises `ModelError`."""
    options.refuse("the torch engine", "devices")
    length_of(options.options)
    if options.kernels is Kernels.BATCH_INVARIANT:
        options.refuse("a torch engine with batch-invariant kernels", "weights")
    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(
        options, load=lambda: load_runner(options), tokenizer=tokenizer, endpoints=endpoints_of(options)
    )


def load_runner(
    options: EngineOptions, *, cache_bytes: int | None = None, starts_early: bool | None = None
) -> TorchRunner:
    """Return the model with its cache; called on the thread that runs it.

    Args:
        cache_bytes: most memory for keys and values. None sets no bound on a CPU. On a GPU, the cache then takes what
            remains after everything else that the engine needs, including the second copy of the weights.
        starts_early: as in `TorchRunner`.

    Raises:
        ModelError: there is no usable model or device, the model's context is too short, not even one sequence of the
            whole context fits, or the weights do not support the requested format.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device, dtype = _device(options.device), getattr(torch, options.dtype.value)
    if options.kernels is Kernels.BATCH_INVARIANT and device.type != "cpu":
        raise ModelError(f"model.kernels=batch_invariant runs on a CPU, and the device is {device.type}; leave it out")
    share = options.memory_share if device.type == "cuda" else None
    if share is not None:  # fail in this process before other processes run out of GPU memory
        torch.cuda.set_per_process_memory_fraction(share)
    kernels_of_torch.avoid_cudnn()
    model = load_for_decoding(
        options.model_path, dtype=options.dtype, device=device, context_length=options.context_length
    )
    refuse_different(model, options.kernels, options.options)
    config: Any = model.config
    options.check_context(config)
    if options.head_precision is HeadPrecision.FP32:
        torch_logprobs.to_fp32(model, served=dtype, kernels=options.kernels)
    if options.kernels is Kernels.BATCH_INVARIANT:
        if dtype is not torch.float32 and not LlamaForward.fits(model):
            raise ModelError(
                f"in {options.dtype}, {type(model).__name__} rounds otherwise than its trainer, so model.kernels="
                "batch_invariant cannot make both equal; set engine.dtype=float32, or leave it out"
            )
        torch_batch_invariant.use_in(model)
    weights = served_weights(model, options.weights)
    shape = cache_shape_of(model, options)
    if device.type == "cuda" and cache_bytes is None:
        free, total = torch.cuda.mem_get_info(device)
        reserved, ours = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        memory = DeviceMemory(total=total, free=free + reserved - ours, ours=ours, share=share)
        budget = _budget(weights, options, shape)
        cache_bytes = budget.cache_within(memory, context_length=options.context_length)
    runner = TorchRunner(
        model, options, weights=weights, shape=shape, cache_bytes=cache_bytes, starts_early=starts_early
    )
    runner.warm_up()
    if options.kernels is Kernels.BATCH_INVARIANT and not torch_batch_invariant.probed(runner.decoded_in_batch):
        raise ModelError(
            f"the model in {options.model_path} computes a token differently in other batches on this machine; leave "
            "out model.kernels"
        )
    return runner


def findings(section: EngineSection, model: ModelSection, others: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield what `pipelinerl check` says of this engine and the model; see `EngineComponent.check`."""
    compute = partial(
        refuse_different, kernels=model.kernels, options=section.options, context_length=section.context_length
    )
    yield from torch_miniature.trial("model.path", model.resolved, compute)


def refuse_different(
    skeleton: PreTrainedModel,
    kernels: Kernels = Kernels.FAST,
    options: Mapping[str, Any] = MappingProxyType({}),
    context_length: int = 0,
) -> bool:
    """Raise `ModelError` if engine and transformers would differ; return False if `torch_miniature` cannot try it."""
    refuse_undecodable(skeleton, context_length)
    changed = [f"model.kernels={kernels}"] * (kernels is not Kernels.FAST)
    changed += [f"engine.options.{name}={value}" for name, value in options.items()]
    part = f"the torch engine{' with ' * bool(changed)}{' and '.join(changed)}"
    return torch_miniature.refuse_different(skeleton, part, partial(_decoded, kernels=kernels, options=options))


def _decoded(model: PreTrainedModel, kernels: Kernels, options: Mapping[str, Any]) -> list[Computed]:
    """Decode after prompts of several lengths, two of them equal; then one of these ends, and another row moves."""
    use_page_cache(model)
    text: Any = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    selected = getattr(text, "index_topk", None)
    context = min(each for each in (_LONGEST, positions, rotary_limit(text.to_dict()), selected) if each)
    vocab = text.vocab_size
    shared = [token % vocab for token in range(3, 3 + 7 * (context - _DECODED), 7)]
    texts = texts_of(model)
    prompts = [*texts, shared, shared, texts[0][:1]]
    settings = EngineOptions(
        model_path=Path(),
        model_id="",
        slots=len(prompts),
        max_waiting=0,
        context_length=context,
        kernels=kernels,
        device=Device.CPU,
        options=options,
    )
    runner = TorchRunner(model, settings)
    runner.prefill([Prefill(prompt[:-1], [row]) for row, prompt in enumerate(prompts) if len(prompt) > 1])
    runner.place(
        [
            RowState(row, prompt[-1], len(prompt) - 1, noise_key=row, temperature=1.0, top_p=1.0, top_k=0)
            for row, prompt in enumerate(prompts)
        ]
    )
    texts = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    for step in range(_DECODED):
        if step == _DECODED // 2:
            rows[3] = rows.pop()
            runner.release([3])
            runner.move([len(rows)], [3])
        for place, first in enumerate(zip(*runner.decode(len(rows)), strict=True)):
            for token_id, logprob in (first, *(each[:2] for each in runner.further.get(place, ()))):
                texts[rows[place]].append(token_id)
                logprobs[rows[place]].append(logprob)
    return [Computed(text, torch.tensor(each)) for text, each in zip(texts, logprobs, strict=True)]


def _device(device: Device) -> torch.device:
    if device is Device.TPU:
        raise ModelError("the torch engine runs on auto, cpu or cuda, got the device tpu; use engine.type jax")
    if device is Device.AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def _budget(weights: TorchWeights | QuantizedWeights, options: EngineOptions, cache: CacheShape) -> EngineBudget:
    return budget_of(
        read_shape(options.model_path),
        dtype=options.dtype,
        wire=options.wire_dtype or options.dtype,
        slots=options.slots,
        context=options.context_length,
        received=weights.layout.num_bytes,
        spare=weights.spare_bytes,
        cache=CacheBytes(
            cache.block_bytes // cache.size, cache.slot_bytes // cache.size, cache.window, cache.state_bytes
        ),
        drafted=length_of(options.options),
    )
