"""Numbers of experts as arrays, and as engines answer them."""

from __future__ import annotations

import numpy as np

from inference_contract.routed_experts import RoutedExperts
from trainer_contract.types import Experts


def on_the_wire(routed: Experts) -> RoutedExperts:
    """Numbers of experts u8 or u16 [tokens, layers, top_k] as an engine answers them."""
    tokens, layers, top_k = routed.shape
    content = np.ascontiguousarray(routed, routed.dtype.newbyteorder("<")).tobytes()
    return RoutedExperts.of("uint8" if routed.itemsize == 1 else "uint16", (tokens, layers, top_k), content)


def off_the_wire(routed: RoutedExperts) -> Experts:
    """Inverse of `on_the_wire`."""
    column: Experts = np.frombuffer(routed.content, np.dtype(routed.dtype).newbyteorder("<")).reshape(routed.shape)
    return column


def of_context(prompt: RoutedExperts) -> Experts:
    """Of a context of one token more, of which row t is of the token before t; the first has none before it."""
    return np.pad(off_the_wire(prompt), ((1, 0), (0, 0), (0, 0)))
