"""Names for a fault: hypotheses about an engine's log-probs and weights, tried until one explains its answers.

    log-probs   before the temperature, at another one, of another token, rounded, off by a constant
    weights     all of an older version, in a coarser dtype, or with a multiple of what training has changed
    a part      the parameters up to or from one of an older version; one layer, or one parameter
    a tensor    zero, doubled, transposed, in a coarser dtype, scaled, one weight doubled; two tensors exchanged

A hypothesis explains the answers if the engine's log-probs differ from it by at most `_UNEXPLAINED` of the difference
from the weights that were due. Each costs a forward pass, so the search ends after `_SEARCH_S` seconds of the thread.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.numerics.evidence import TILTS
from pipelinerl.training.canary_check import Compared
from pipelinerl.types import Rollout
from trainer_contract.types import Float32, HostWeights, ParameterInfo

#: The share of the mean difference that a hypothesis may leave unexplained, and the share that ends the search.
_UNEXPLAINED: Final = 0.2
_EXPLAINED: Final = 0.005
_SEARCH_S: Final = 15.0
#: The step of a weight's scale for a derivative, and the largest change of scale that a straight line predicts.
_STEP: Final = 0.01
_LINEAR: Final = 0.3
#: Decimals to which a server may round log-probs.
_DECIMALS: Final = (1, 2, 3, 4)
#: The part of a parameter's name that names its layer.
_LAYER: Final = re.compile(r"^.*?\.\d+(?=\.)")

Values = NDArray[np.float32]
#: A hypothesis, as a sentence, and the log-probs f32 [N] that the engine then reports.
Hypothesis = tuple[str, Float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSearch:
    """The search for the fault of one engine at `version`.

    `score` returns the log-probs f32 [N] of all sampled tokens of rollouts, by the weights that were due or by others.
    `tilted` holds those at `TILTS` times the temperature [tilts, N], `kept` the weights of some versions.
    """

    version: int
    compared: Compared
    score: Callable[[Sequence[Rollout], HostWeights | None], Float32]
    tilted: Float32
    kept: Mapping[int, HostWeights]
    layout: Sequence[ParameterInfo]

    def sentence(self) -> str:
        theirs, ours = self.compared.theirs, self.compared.ours
        total = float(np.abs(theirs - ours).mean())
        if not math.isfinite(total):
            return "some are not finite"
        left, best, until = math.inf, "", time.thread_time() + _SEARCH_S
        for named, logprobs in self._hypotheses():
            rest = float(np.abs(theirs - logprobs).mean())
            if rest < left / 2:  # of hypotheses that explain as much, take the first
                left, best = rest, named
            if left <= _EXPLAINED * total or time.thread_time() > until:
                break
        if left <= _UNEXPLAINED * total:
            return best
        near = f"; nearest: {best}, which leaves {left / total:.0%} of the difference" if left < total / 2 else ""
        return f"unknown cause: no former weights or known setting explains them{near}"

    def _hypotheses(self) -> Iterator[Hypothesis]:
        yield from self._of_reports()
        current = self.kept.get(self.version)
        older = {version: self.kept[version] for version in sorted(self.kept, reverse=True) if version < self.version}
        for version, weights in older.items():
            named = f"they fit the weights of version {version}: it has not applied a newer update"
            yield named, self._scored(weights)
        if current is None:
            return
        coarse = {info.name: _packed(info, _coarser(info, self._of(current, info))) for info in self.layout}
        yield "they fit weights in a coarser dtype", self._scored(coarse)
        if older:
            newest, first = next(iter(older.items())), min(older.items())
            yield from self._overdone(current, *first)
            for version, weights in dict([newest, first]).items():
                yield from self._partly_old(current, version, weights)
        yield from self._spoiled(current)

    def _of_reports(self) -> Iterator[Hypothesis]:
        rollouts, theirs, ours = self.compared.rollouts, self.compared.theirs, self.compared.ours
        if any(each.temperature != 1.0 for each in rollouts):
            raw = [replace(each, temperature=1.0) for each in rollouts]
            yield "they are those before the temperature", self.score(raw, None)
        for factor, logprobs in zip(TILTS, self.tilted, strict=True):
            yield f"they are those of {factor:g} times the temperature", logprobs
        for by, side in ((1, "before"), (-1, "after")):
            yield f"they are those of the token {side}", np.roll(ours, by)
        for decimals in _DECIMALS:
            yield f"they are rounded to {decimals} decimals", np.round(ours, decimals)
        off = float(np.median(theirs - ours))
        yield f"all of them are off by {off:.3g} nats", ours + np.float32(off)

    def _overdone(self, current: HostWeights, version: int, start: HostWeights) -> Iterator[Hypothesis]:
        for factor in (0.5, 2.0):
            weights = {
                info.name: _packed(info, (1 - factor) * self._of(start, info) + factor * self._of(current, info))
                for info in self.layout
            }
            named = f"they fit version {version} plus {factor:g} times all changes since, as an adapter applied wrongly"
            yield named, self._scored(weights)

    def _partly_old(self, current: HostWeights, version: int, older: HostWeights) -> Iterator[Hypothesis]:
        names = [info.name for info in self.layout]
        layers: dict[str, list[str]] = {}
        for name in names:
            for part in dict.fromkeys((name, _layer(name))):
                layers.setdefault(part, []).append(name)
        for part, its in layers.items():
            mixed = {**current, **{name: older[name] for name in its}}
            yield f"they fit {part} of version {version} in version {self.version}", self._scored(mixed)
        ends = [cut for cut in range(1, len(names)) if _layer(names[cut]) != _layer(names[cut - 1])]
        for cut in [len(names) // 2, *ends]:
            for side, its in (("after", names[cut:]), ("before", names[:cut])):
                mixed = {**current, **{name: older[name] for name in its}}
                at = names[cut - 1] if side == "after" else names[cut]
                yield f"they fit all parameters {side} {at} of version {version}", self._scored(mixed)

    def _spoiled(self, current: HostWeights) -> Iterator[Hypothesis]:
        theirs, ours = self.compared.theirs, self.compared.ours
        for info in self.layout:
            values = self._of(current, info)
            for named, changed in _tensors(info, values):
                yield f"{info.name} {named}", self._scored({**current, info.name: _packed(info, changed)})
            scaled = {**current, info.name: _packed(info, values * (1 + _STEP))}
            slope = (self._scored(scaled) - ours) / _STEP
            by = float(slope @ (theirs - ours)) / max(float(slope @ slope), 1e-30)
            if 0 < abs(by) < _LINEAR:
                scaled[info.name] = _packed(info, values * np.float32(1 + by))
                yield f"{info.name} is scaled by {1 + by:.4g}", self._scored(scaled)
        for at, info in enumerate(self.layout):
            for other in self.layout[at + 1 :]:
                if info.shape == other.shape and _differ_in_one_part(info.name, other.name):
                    swapped = {**current, info.name: current[other.name], other.name: current[info.name]}
                    yield f"{info.name} and {other.name} are exchanged", self._scored(swapped)

    def _scored(self, weights: HostWeights) -> Float32:
        return self.score(self.compared.rollouts, weights)

    @staticmethod
    def _of(weights: HostWeights, info: ParameterInfo) -> Values:
        data = weights[info.name]
        if info.dtype == "bfloat16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
        return data.view(info.dtype).reshape(info.shape).astype(np.float32)


def _layer(name: str) -> str:
    """Return the name of a parameter's layer; the parameter's own outside layers."""
    match = _LAYER.match(name)
    return match[0] if match else name


def _tensors(info: ParameterInfo, values: Values) -> Iterator[tuple[str, Values]]:
    yield "is zero", np.zeros_like(values)
    yield "is doubled", values * 2
    yield "is in a coarser dtype", _coarser(info, values)
    if len(info.shape) == 2:
        yield "is transposed", np.ascontiguousarray(values.T).reshape(info.shape)
    if len(info.shape) == 3:
        yield "has its experts exchanged", np.roll(values, 1, 0)
    largest = values.copy()
    largest.flat[int(np.abs(values).argmax())] *= 2
    yield "has its largest weight doubled", largest


def _packed(info: ParameterInfo, values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes u8 [n] of values, rounded to the parameter's dtype."""
    if info.dtype == "bfloat16":
        return (_bfloat16(values.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(values, info.dtype).reshape(-1).view(np.uint8)


def _coarser(info: ParameterInfo, values: Values) -> Values:
    """Round float32 to bfloat16, and other dtypes to float8 (e4m3)."""
    if info.dtype == "float32":
        return _bfloat16(values)
    _, exponents = np.frexp(values)
    spacing = np.exp2(np.maximum(exponents - 1, -6) - 3).astype(np.float32)
    return np.clip(np.round(values / spacing) * spacing, -448, 448)


def _bfloat16(values: Values) -> Values:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest: Values = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return nearest


def _differ_in_one_part(name: str, other: str) -> bool:
    pairs = list(zip(name.split("."), other.split("."), strict=False))
    return name.count(".") == other.count(".") and sum(one != two for one, two in pairs) == 1
