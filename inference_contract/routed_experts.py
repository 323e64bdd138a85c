"""`RoutedExperts`, the wire format of the experts that a mixture-of-experts model chose for each token.

This extension follows `routed_experts` of vLLM and SGLang. It is optional: an engine that does not support it rejects
`return_routed_experts` by name.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from math import prod
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from inference_contract.wire import Wire

_BYTES: Final = {"uint8": 1, "uint16": 2}

_Size = Annotated[int, Field(ge=0, lt=2**31)]


class RoutedExperts(Wire):
    """Expert indices [tokens, layers, top_k], in the order in which the router chose them.

    `layers` counts the layers with a router. `data` is the base64 encoding of the indices in C order, little endian,
    with one byte per index if a layer has at most 256 experts, else two.
    """

    dtype: Literal["uint8", "uint16"]
    shape: tuple[_Size, _Size, _Size]
    data: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        expected = prod(self.shape) * _BYTES[self.dtype]
        try:
            received = len(self.content)
        except binascii.Error as error:
            raise ValueError(f"data is not base64: {error}") from None
        if received != expected:
            raise ValueError(
                f"data must be {expected} bytes in base64 for {self.dtype} {list(self.shape)}, got {received}"
            )
        return self

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def content(self) -> bytes:
        return b64decode(self.data, validate=True)

    def is_like(self, other: RoutedExperts) -> bool:
        """Return True if `other` has the same dtype, layers and top_k, and so can belong to the same model."""
        return self.dtype == other.dtype and self.shape[1:] == other.shape[1:]

    @classmethod
    def of(cls, dtype: Literal["uint8", "uint16"], shape: tuple[int, int, int], content: bytes) -> Self:
        return cls.model_construct(dtype=dtype, shape=shape, data=b64encode(content).decode())

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Concatenate `parts`, at least one, along the token axis; all must have the same dtype, layers and top_k."""
        first = parts[0]
        tokens = sum(part.num_tokens for part in parts)
        return cls.of(first.dtype, (tokens, *first.shape[1:]), b"".join(part.content for part in parts))
