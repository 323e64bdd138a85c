"""AdamW (Loshchilov and Hutter 2019, Algorithm 2): torch's own, or `PiecewiseAdamW` for a smaller state.

    moments    fp32, or bf16 with stochastic rounding, which is unbiased
    masters    fp32 values of parameters that passes use in bf16
    place      the parameters' device or the host: where moments and masters are kept between steps

`PiecewiseAdamW` runs torch's fused kernel on one piece of a parameter after the other, so only one piece of the fp32
moments and master is on the device. Moments are rounded stochastically, because rounding to nearest would lose small
changes: with beta2 = 0.999, a second moment in bf16 would never decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw as fused_step

from pipelinerl import rng
from pipelinerl.numerics.dither_torch import rounded
from pipelinerl.trainers.torch.options import MomentDType, OptimizerOptions, StatePlace
from trainer_contract.types import OptimizerSpec, Rounding

#: Number of elements per piece of a parameter; one piece is stepped at a time.
_PIECE: Final = 2**22
#: Mask of the bits of an fp32 value that bf16 drops.
_DROPPED: Final = 0xFFFF
_DTYPES: Final = {MomentDType.FP32: torch.float32, MomentDType.BF16: torch.bfloat16}
#: Keys of the optimizer's state of a parameter: the number of steps and the two moments.
STEP: Final = "step"
MEAN: Final = "exp_avg"
SQUARE: Final = "exp_avg_sq"


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy values to the device, asynchronously if pinned, then convert them there; torch converts on the CPU."""
    return values.to(device, non_blocking=True).to(dtype)


def adamw(
    parameters: Iterable[Tensor],
    spec: OptimizerSpec,
    options: OptimizerOptions,
    *,
    seed: int,
    shard: int = 0,
    masters: Mapping[Tensor, Master] | None = None,
) -> ParameterOptimizer:
    """Create AdamW without weight decay for vectors; without `parameters`, as in a process of a mesh, its steps do
    nothing. `seed` and `shard` determine stochastic rounding; `masters` maps bf16 parameters to their fp32 values on
    the host.
    """
    trained = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if options == OptimizerOptions():
        return AdamW(groups, betas=spec.betas, eps=spec.eps, fused=True)
    return PiecewiseAdamW(groups, spec, options, seed=rng.key(seed, "moments", shard), masters=masters or {})


def restored_state(
    moments: Mapping[str, Tensor], parameter: Tensor, options: OptimizerOptions = OptimizerOptions()
) -> dict[str, Tensor]:
    """Copy a parameter's saved state, of any dtype, to the dtype and memory in which the optimizer keeps it."""
    kept: dict[str, Tensor] = {}
    for name, each in moments.items():
        if name == STEP:
            kept[name] = each.clone().to(parameter.device if options == OptimizerOptions() else None)
        else:
            kept[name] = _empty(parameter, dtype_of(options), options.place)
            kept[name].copy_(each)
    return kept


def dtype_of(options: OptimizerOptions) -> torch.dtype:
    """Return the dtype of the moments."""
    return _DTYPES[options.moments]


class Master(NamedTuple):
    """The fp32 values, on the host, of the parameter `name`, which the device holds in bf16."""

    name: str
    values: Tensor
    rounding: Rounding

    def rounded(self, values: Tensor, *, first: int = 0) -> Tensor:
        """Round a piece of the new fp32 values to bf16; `first` is its offset in the parameter, for dithering."""
        return rounded(values, torch.bfloat16, self.rounding, name=self.name, first=first)


class PiecewiseAdamW:
    """AdamW whose moments are bf16 or whose state is on the host; `step` returns when that state is written."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        spec: OptimizerSpec,
        options: OptimizerOptions,
        *,
        seed: int,
        masters: Mapping[Tensor, Master],
    ) -> None:
        self.param_groups = [{"lr": 0.0, **group} for group in groups]
        self.state: dict[Any, Any] = {}
        self._betas, self._eps = spec.betas, spec.eps
        self._options = options
        self._seed = seed
        self._masters = masters

    @torch.no_grad()
    def step(self) -> None:
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._step(parameter, group, number)
        if self._options.place is StatePlace.HOST and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none  # ignored: a gradient of zeros, unlike None, would cause a step
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _step(self, parameter: Tensor, group: Mapping[str, Any], number: int) -> None:
        if parameter not in self.state:
            moments = {name: _empty(parameter, dtype_of(self._options), self._options.place) for name in (MEAN, SQUARE)}
            self.state[parameter] = {STEP: torch.zeros(())} | {name: each.zero_() for name, each in moments.items()}
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "the caller has looked"
        master = self._masters.get(parameter)
        kept = [state[MEAN].view(-1), state[SQUARE].view(-1)] + ([] if master is None else [master.values.view(-1)])
        values, slopes = parameter.detach().view(-1), gradient.reshape(-1)
        noise = None  # fp32 moments are not rounded
        if self._options.moments is MomentDType.BF16:
            seed = rng.key(self._seed, int(state[STEP]), number)
            noise = torch.Generator(parameter.device).manual_seed(seed)
        # Copied to the device once, since a copy from pageable memory makes the host wait.
        count = state[STEP].to(parameter.device)
        for start in range(0, len(values), _PIECE):
            piece = slice(start, start + _PIECE)
            mean, square, *rest = (to_device(each[piece], parameter.device, torch.float32) for each in kept)
            (stepped,) = rest or (values[piece],)
            fused_step(
                [stepped],
                [slopes[piece]],
                [mean],
                [square],
                [],
                [count.clone()],  # the kernel increments it
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self._eps,
                maximize=False,
            )
            self._keep([mean, square], [each[piece] for each in kept[:2]], noise)
            if master is not None:
                values[piece].copy_(master.rounded(stepped, first=start))
                _keep(stepped, kept[2][piece])
        state[STEP] += 1

    def _keep(self, moments: list[Tensor], kept: list[Tensor], noise: torch.Generator | None) -> None:
        if noise is None:
            for moment, place in zip(moments, kept, strict=True):
                _keep(moment, place)
            return
        drawn = torch.empty(moments[0].shape, dtype=torch.int32, device=moments[0].device)
        drawn.random_(-(2**31), 2**31, generator=noise)
        for moment, place, shift in zip(moments, kept, (0, 16), strict=True):
            _keep(rounded_at_random(moment, drawn >> shift), place)


#: The optimizer of a trainer's parameters. Callers set `lr` in `param_groups` before each step; `state` has `step` and
#: both moments of each parameter that has been stepped.
ParameterOptimizer = AdamW | PiecewiseAdamW


def rounded_at_random(values: Tensor, drawn: Tensor) -> Tensor:
    """Round fp32 to bf16 stochastically (unbiased) with the random i32 `drawn`; overwrites `values`."""
    bits = values.view(torch.int32)
    return bits.add_(drawn & _DROPPED).bitwise_and_(~_DROPPED).view(torch.float32).bfloat16()


def _keep(values: Tensor, place: Tensor) -> None:
    if values.data_ptr() != place.data_ptr():
        place.copy_(values, non_blocking=True)


def _empty(parameter: Tensor, dtype: torch.dtype, place: StatePlace) -> Tensor:
    if place is StatePlace.DEVICE:
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=dtype, pin_memory=parameter.is_cuda)
