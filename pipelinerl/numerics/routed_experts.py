"""Conversion of the indices of routed experts (MoE) between arrays and the engines' wire format."""

from __future__ import annotations

import numpy as np

from inference_contract.routed_experts import RoutedExperts
from trainer_contract.types import Experts


def on_the_wire(routed: Experts) -> RoutedExperts:
    """Encode expert indices, u8 or u16 [tokens, layers, top_k], in the engines' wire format."""
    tokens, layers, top_k = routed.shape
    content = np.ascontiguousarray(routed, routed.dtype.newbyteorder("<")).tobytes()
    return RoutedExperts.of("uint8" if routed.itemsize == 1 else "uint16", (tokens, layers, top_k), content)


def off_the_wire(routed: RoutedExperts) -> Experts:
    """Decode expert indices, u8 or u16 [tokens, layers, top_k]; the inverse of `on_the_wire`."""
    column: Experts = np.frombuffer(routed.content, np.dtype(routed.dtype).newbyteorder("<")).reshape(routed.shape)
    return column


def of_context(prompt: RoutedExperts) -> Experts:
    """Return a prompt's experts as in `MicroBatch`: row t has the experts chosen for token t − 1, row 0 has zeros."""
    return np.pad(off_the_wire(prompt), ((1, 0), (0, 0), (0, 0)))
