"""`WEIGHT_FAULTS`: the ways in which an engine's weights can differ from those that it was sent.

A fault is a function that returns the weights that a faulty engine would serve. `pipelinerl conformance faults` sends
them to a correct engine and compares it with the weights that were due: to every detector that is the same as a faulty
engine. Tests put the same faults into engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from inference_contract.conformance.reference import Difference, Weights, packed, perturbed, unpacked
from inference_contract.conformance.reference_checks import answers, publish, reference_of
from inference_contract.conformance.session import Session


@dataclass(frozen=True, slots=True)
class Sent:
    """An update: the weights of the engine's start, those that served before it, and those that were sent."""

    start: Weights
    before: Weights
    due: Weights

    def one(self, pattern: str = r"o_proj|down_proj|c_proj|weight") -> str:
        """Return the matrix in the middle of the model whose name has the earliest alternative of `pattern`."""
        for each in pattern.split("|"):
            named = [name for name, w in self.due.items() if w.ndim == 2 and re.search(each, name)]
            if named:
                return named[len(named) // 2]
        raise LookupError(f"the model has no matrix named {pattern}")

    def pair(self, one: str, other: str) -> tuple[str, str]:
        """Return the names of two parameters of one shape that differ by `one` and `other`; the last such pair."""
        for name in reversed(self.due):
            twin = name.replace(one, other)
            if one in name and twin in self.due and self.due[twin].shape == self.due[name].shape:
                return name, twin
        raise LookupError(f"the model has no {one} and {other} of one shape")

    def layers(self, kind: str) -> tuple[str, str]:
        """Return the names of a parameter `kind` in the first and the last layer."""
        named = [name for name, w in self.due.items() if kind in name and w.shape == self.due[self.first(kind)].shape]
        if len(named) < 2:
            raise LookupError(f"the model has no two layers with {kind}")
        return named[0], named[-1]

    def first(self, kind: str) -> str:
        for name in self.due:
            if kind in name:
                return name
        raise LookupError(f"the model has no {kind}")


#: Function from an update to the weights that are served after it. Raises `LookupError` if the model has no such part.
Fault = Callable[[Sent], Weights]


def _with(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def spoil(sent: Sent) -> Weights:
        name = sent.one()
        return sent.due | {name: change(sent.due[name])}

    return spoil


def _from(which: Callable[[Sent], Weights], choose: Callable[[Sent], set[str]]) -> Fault:
    return lambda sent: sent.due | {name: which(sent)[name] for name in choose(sent)}


def _exchanged(choose: Callable[[Sent], tuple[str, str]]) -> Fault:
    def spoil(sent: Sent) -> Weights:
        one, other = choose(sent)
        return sent.due | {one: sent.due[other], other: sent.due[one]}

    return spoil


def _transposed(sent: Sent) -> Weights:
    square = [name for name, w in sent.due.items() if w.ndim == 2 and w.shape[0] == w.shape[1]]
    name = square[len(square) // 2] if square else sent.one()
    values = sent.due[name]
    return sent.due | {name: values.t().contiguous().view(values.shape)}


def _one_weight(values: torch.Tensor) -> torch.Tensor:
    changed = values.clone()
    largest = int(values.abs().argmax())
    changed.view(-1)[largest] *= 2
    return changed


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to the next coarser dtype, and back."""
    coarser = torch.bfloat16 if values.dtype == torch.float32 else torch.float8_e4m3fn
    return values.to(coarser).to(values.dtype)


def _experts(sent: Sent) -> Weights:
    for name, values in sent.due.items():
        if "experts" in name and values.ndim == 3:
            return sent.due | {name: values.roll(1, 0)}
    one, other = sent.pair("experts.0.", "experts.1.")
    return _exchanged(lambda _: (one, other))(sent)


def _adapter(factor: float) -> Fault:
    """Serve the weights of the start plus `factor` times all that training has changed since."""
    return lambda sent: {
        name: (sent.start[name].double() + factor * (due.double() - sent.start[name].double())).to(due.dtype)
        for name, due in sent.due.items()
    }


def _half(sent: Sent) -> set[str]:
    return set(list(sent.due)[len(sent.due) // 2 :])


#: The faults by what is wrong.
WEIGHT_FAULTS: Final[Mapping[str, Fault]] = {
    "one tensor is the last version's": _from(lambda sent: sent.before, lambda sent: {sent.one()}),
    "one tensor was never loaded": _from(lambda sent: sent.start, lambda sent: {sent.one()}),
    "one tensor is zero": _with(torch.zeros_like),
    "one tensor was added twice": _with(lambda values: values * 2),
    "one tensor is transposed": _transposed,
    "one tensor times 1.01": _with(lambda values: (values.double() * 1.01).to(values.dtype)),
    "one tensor times 1.001": _with(lambda values: (values.double() * 1.001).to(values.dtype)),
    "the largest weight of one tensor is doubled": _with(_one_weight),
    "one tensor in a coarser dtype": _with(_rounded),
    "all tensors in a coarser dtype": lambda sent: {name: _rounded(values) for name, values in sent.due.items()},
    "q and k are exchanged": _exchanged(lambda sent: sent.pair("q_proj.weight", "k_proj.weight")),
    "gate and up are exchanged": _exchanged(lambda sent: sent.pair("gate_proj.weight", "up_proj.weight")),
    "two norms are exchanged": _exchanged(lambda sent: sent.pair("input_layernorm", "post_attention_layernorm")),
    "two layers' q are exchanged": _exchanged(lambda sent: sent.layers("q_proj.weight")),
    "experts are exchanged": _experts,
    "the untied head is the last version's": _from(lambda sent: sent.before, lambda sent: {sent.first("lm_head")}),
    "half of the layers are the last version's": _from(lambda sent: sent.before, _half),
    "half of the layers were never loaded": _from(lambda sent: sent.start, _half),
    "no tensor follows": lambda sent: dict(sent.before),
    "all weights are those of the start": lambda sent: dict(sent.start),
    "the adapter is applied twice": _adapter(2.0),
    "the adapter is applied at half its scale": _adapter(0.5),
    "all weights drift by 1e-3": lambda sent: perturbed(sent.due, 77, strength=1e-3),
    "all weights drift by 1e-4": lambda sent: perturbed(sent.due, 77, strength=1e-4),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault that was sent to an engine, and what the comparison found; None if the model has no such part."""

    fault: str
    found: Difference | None

    def __str__(self) -> str:
        if self.found is None:
            return f"{'no such part':<13}{self.fault}"
        caught = "not caught" if self.found.is_allowed else "caught"
        return (
            f"{caught:<13}{self.fault:<46} {self.found.typical:8.2g} nats, allowed {self.found.allowed[0]:.2g}; "
            f"at most {self.found.worst:.2g}"
        )


def sent_to(session: Session) -> Iterator[Trial]:
    """Send each fault to the engine of a session and yield what the kit's comparison shows; first no fault.

    Raises `AssertionError` if the engine already differs without a fault, and `NotOffered` without a reference.
    """
    reference = reference_of(session)
    layout = session.card().layout
    start = unpacked(packed(reference.directory, layout), layout)
    sent = Sent(start, *(unpacked(packed(perturbed(start, tag), layout), layout) for tag in (2, 1)))
    for name, fault in {"none": lambda sent: sent.due, **WEIGHT_FAULTS}.items():
        try:
            wrong = fault(sent)
        except LookupError:
            yield Trial(name, None)
            continue
        version = publish(session, wrong)
        reference.take(sent.due)
        found = reference.difference(answers(session, version))
        assert name != "none" or found.is_allowed, f"without a fault, {found}"
        yield Trial(name, found)
