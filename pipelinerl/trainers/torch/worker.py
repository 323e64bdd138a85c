"""`TorchWorker`, a single-process torch trainer on accelerate; `TorchTrainer` checks the arguments of its methods."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs
from torch import Tensor

from pipelinerl.numerics.dither_torch import UpdateProbe, rounded
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.adamw import Master, ParameterOptimizer, adamw, restored_state, to_device
from pipelinerl.trainers.torch.loading import LoadedModel, load, refuse_device
from pipelinerl.trainers.torch.options import StatePlace, TorchOptions, share_of
from pipelinerl.trainers.torch.packed.planner import planning
from pipelinerl.trainers.torch.packed_model import COMPILED_FROM, PackedModel, PackedValueModel, compile_layers
from pipelinerl.trainers.torch.passes import (
    PassSetting,
    broken_loss,
    evaluate,
    made_up_batch,
    predict,
    predicted,
    require_finite,
)
from trainer_contract.errors import NonFiniteError
from trainer_contract.types import (
    Device,
    Float32,
    Head,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    Precision,
    Rounding,
    StepStats,
    TrainerSpec,
)

log = logging.getLogger("pipelinerl")


@dataclass(slots=True)
class TorchWorker:
    """The state of a single-process trainer; `model` is the module that accelerate prepared."""

    spec: TrainerSpec
    accelerator: Accelerator
    model: PackedModel | PackedValueModel
    setting: PassSetting
    optimizer: ParameterOptimizer
    loaded: LoadedModel
    #: The trained values. Parameters share this storage, except while `_lent` gives them other weights.
    own: Mapping[str, Tensor]
    #: fp32 masters on the host, by name, of those tensors in `own` that are bf16.
    masters: Mapping[str, Tensor]
    random: torch_state.RandomState
    #: The parameters that the optimizer trains, by name: all of `own`, or adapters.
    trained: Mapping[str, torch.nn.Parameter]
    #: Names of the parameters that passes use only in bf16, because autocast would round them anyway.
    narrow: frozenset[str] = frozenset()
    #: A policy's weights of this version, rounded as engines hold them. They are computed when the version is made,
    #: because a publication reads them on a separate stream.
    served: Mapping[str, Tensor] = field(default_factory=dict)
    model_version: int = 0
    has_gradient: bool = False
    #: Probe that measures the effect of rounding to the engines' dtype. None if weights are sent in fp32, and None for
    #: adapters, because their merged weights exist only while they are sent.
    probe: UpdateProbe | None = None

    @classmethod
    def started(cls, spec: TrainerSpec, options: TorchOptions) -> TorchWorker:
        refuse_device(spec.device)
        accelerator = _accelerator(spec)
        loaded = load(spec)
        text = loaded.config.get_text_config().to_dict()
        attention = planning(
            options.attention, spec.precision, accelerator.device, text, spec.kernels, packs=loaded.model.packs
        )
        log.info("attention: %s", attention.description)
        is_half = spec.precision is Precision.BF16
        masters = loaded.move_to(accelerator.device, masters=options.optimizer.place if is_half else StatePlace.DEVICE)
        trained, weights = loaded.trained, loaded.weights
        compiles = options.compile
        if compiles is None:
            model, count = loaded.model, sum(each.numel() for each in loaded.model.parameters())
            is_fixed = model.packs and model.routing is None
            compiles = accelerator.device.type == "cuda" and is_fixed and count >= COMPILED_FROM
        if compiles:
            compile_layers(loaded.model, gradient_checkpointing=spec.gradient_checkpointing)
        if loaded.adapters is not None:
            log.info("LoRA: %s", share_of(*loaded.adapters.counts))
        model = accelerator.prepare(loaded.model)
        rounding = spec.rounding if loaded.gather_dtype is torch.bfloat16 else Rounding.NEAREST
        apart: dict[Tensor, Master] = {
            trained[name]: Master(name, values, rounding) for name, values in masters.items()
        }
        for parameter, master in apart.items():
            parameter.detach().copy_(master.rounded(master.values))
        optimizer = adamw(trained.values(), spec.optimizer, options.optimizer, seed=spec.seed, masters=apart)
        worker = cls(
            spec=spec,
            accelerator=accelerator,
            model=model,
            setting=PassSetting(accelerator.device, attention.plan_of),
            optimizer=optimizer,
            loaded=loaded._replace(saved=None, reader=None),
            own={name: parameter.detach() for name, parameter in weights.items()},
            masters=masters,
            random=torch_state.RandomState.now(),
            trained=trained,
            narrow=loaded.use_bf16_in_passes() if is_half else frozenset(),
        )
        if loaded.adapters is None:
            worker.probe = UpdateProbe.of({**worker.own, **masters}, loaded.gather_dtype, spec.rounding)
        if loaded.saved is not None:
            moments = loaded.saved.moments({name: parameter.shape for name, parameter in trained.items()})
            for name, its in moments.items():
                optimizer.state[trained[name]] = restored_state(its, trained[name], options.optimizer)
            worker.model_version, worker.random = loaded.saved.model_version, loaded.saved.random
            worker.random.restore()
        worker._serve()
        if compiles:
            worker._warm_up()
        return worker

    @property
    def width(self) -> int:
        return 1

    def forward(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        with self._computing_as_engines():
            return self._forward(batches)

    def _forward(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        predictions = []
        for batch in batches:
            predictions.append(predicted(self.model, self.setting, batch))
            require_finite(predictions[-1])
        return predictions

    def _computing_as_engines(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters have the same rounded values as in the engines.

        An engine with rounded weights samples from another policy than the fp32 weights define. The gradient ignores
        the rounding (straight-through). With adapters nothing changes, since engines round merged weights.
        """
        if self.loaded.gather_dtype is torch.float32 or not self.served:
            return nullcontext()
        return _lent(self.loaded.weights.items(), lambda name, _: self.served[name], narrow=self.narrow)

    def _serve(self) -> None:
        """Keep a policy's current weights in `served`, rounded as engines hold them; copy only if dtypes differ."""
        if self.loaded.adapters is None and self.spec.head is Head.POLICY:
            self.served = {name: self._rounded(name, own) for name, own in self.own.items()}

    def _rounded(self, name: str, own: Tensor) -> Tensor:
        dtype = self.loaded.gather_dtype
        if own.dtype is dtype:  # a parameter with a master is in bf16 already, rounded as engines hold it
            return own
        return rounded(self.masters.get(name, own), dtype, self.spec.rounding, name=name)

    def _warm_up(self) -> None:
        """Compile the layers by passes over made-up tokens, so that this happens while engines start."""
        log.info("layers: compiling")
        # Segments of different lengths, with enough loss tokens for several pieces of the logits of a large vocabulary:
        # otherwise torch would compile some parts again for the first real batch.
        batch = made_up_batch(np.arange(33, 145, 8), vocab_size=self.loaded.vocab_size)
        with self._computing_as_engines():
            with torch.no_grad():
                predict(self.model, self.setting, batch, batch.loss_mask)
            nothing = 0.0 * predict(self.model, self.setting, batch, batch.loss_mask).sum()
            self.accelerator.backward(nothing)
        self.discard_gradient()

    def forward_at(self, batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        adapters = self.loaded.adapters
        off = nullcontext() if adapters is None else adapters.off()  # `weights` already include merged adapters

        def held(name: str, own: Tensor) -> Tensor:
            return torch.from_numpy(weights[name]).view(self.loaded.gather_dtype).view(own.shape)

        with off, _lent(self.loaded.weights.items(), held, narrow=self.narrow):
            return self._forward(batches)

    def backward(self, batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        dropping = nullcontext() if self.loaded.adapters is None else self.loaded.adapters.dropping_out()
        results = []
        with self._computing_as_engines(), dropping:
            for number, batch in enumerate(batches):
                if not batch.loss_mask.any():
                    results.append(LossStats(0.0, batch.loss_mask.astype("float32")))
                    continue
                loss, stats = evaluate(self.model, self.setting, batch, objective)
                if not math.isfinite(stats.loss):
                    self.discard_gradient()
                    raise broken_loss(stats.loss, number)
                self.accelerator.backward(loss)
                results.append(stats)
        self.has_gradient = True
        return results

    def optimizer_step(self, learning_rate: float) -> StepStats:
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        clip = self.spec.optimizer.grad_clip or math.inf
        norm = float(self.accelerator.clip_grad_norm_(parameters, clip)) if parameters else 0.0
        if not math.isfinite(norm):
            self.discard_gradient()
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are unchanged")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.served = {}
        before = None if self.probe is None else self.probe.read()
        self.optimizer.step()
        seen = None if self.probe is None or before is None else self.probe.share(before, self.probe.read())
        self.discard_gradient()
        self._serve()
        self.model_version += 1
        self.random = torch_state.RandomState.now()
        return StepStats(self.model_version, norm, learning_rate, seen)

    def discard_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.has_gradient = False

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        dtype = str(self.loaded.gather_dtype).removeprefix("torch.")
        return tuple(ParameterInfo(name, tuple(own.shape), dtype) for name, own in self.own.items())

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and detached tensors, which share memory with fp32 parameters that are sent as they are."""
        for name, own in self.own.items():
            if self.loaded.adapters is not None:
                own = self.loaded.adapters.merged(name, own)
                yield name, rounded(own, self.loaded.gather_dtype, self.spec.rounding, name=name)
            else:
                yield name, self.served[name] if self.served else self._rounded(name, own)

    def save_state(self, path: Path) -> None:
        names, adapters = {id(parameter): name for name, parameter in self.trained.items()}, self.loaded.adapters
        if adapters is None:
            self.loaded.model.save(path / torch_state.MODEL, {**self.own, **self.masters})
        else:
            adapters.save(path / torch_state.ADAPTER, base=self.spec.model_path, values={**self.trained, **self.own})
        torch_state.save(
            path,
            config=self.loaded.config,
            random=self.random,
            head=self.spec.head,
            moments={names[id(parameter)]: moments for parameter, moments in self.optimizer.state.items()},
            model_version=self.model_version,
            lora=None if adapters is None else adapters.record(digest=self.loaded.base_digest),
        )

    def close(self) -> None:
        self.accelerator.free_memory()


def _accelerator(spec: TrainerSpec) -> Accelerator:
    # accelerate keeps one state per process and rejects a second precision; reset it, so that trainers of one process
    # may differ.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    precision = "bf16" if spec.precision is Precision.BF16 else "no"
    # The docstring of `computing_in` says why autocast's cache of weights is off.
    uncached = AutocastKwargs(cache_enabled=False)
    accelerator = Accelerator(cpu=spec.device is Device.CPU, mixed_precision=precision, kwargs_handlers=[uncached])
    if spec.memory_share is not None and accelerator.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(spec.memory_share)
    return accelerator


@contextmanager
def _lent(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    values_of: Callable[[str, Tensor], Tensor],
    *,
    narrow: Collection[str],
) -> Iterator[None]:
    """Let each parameter hold `values_of(name, own values)` in the block, in bf16 for `narrow`; then restore."""
    own = {name: (parameter, parameter.data) for name, parameter in parameters}
    try:
        for name, (parameter, data) in own.items():
            dtype = torch.bfloat16 if name in narrow else data.dtype
            parameter.data = to_device(values_of(name, data), data.device, dtype)
        yield
    finally:
        for parameter, data in own.values():
            parameter.data = data
