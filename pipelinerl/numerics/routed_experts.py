"""Conversion of routed expert numbers (MoE) between arrays and the wire format of engines."""

from __future__ import annotations

import numpy as np

from inference_contract.routed_experts import RoutedExperts
from trainer_contract.types import Experts


def on_the_wire(routed: Experts) -> RoutedExperts:
    """Encode expert numbers u8 or u16 [tokens, layers, top_k] in the wire format of engines."""
    tokens, layers, top_k = routed.shape
    content = np.ascontiguousarray(routed, routed.dtype.newbyteorder("<")).tobytes()
    return RoutedExperts.of("uint8" if routed.itemsize == 1 else "uint16", (tokens, layers, top_k), content)


def off_the_wire(routed: RoutedExperts) -> Experts:
    """Decode expert numbers; the inverse of `on_the_wire`."""
    column: Experts = np.frombuffer(routed.content, np.dtype(routed.dtype).newbyteorder("<")).reshape(routed.shape)
    return column


def of_context(prompt: RoutedExperts) -> Experts:
    """Pad a prompt's experts by one row, for one more token: row t then holds the experts at token t − 1, and row 0 is
    zero.
    """
    return np.pad(off_the_wire(prompt), ((1, 0), (0, 0), (0, 0)))
