"""The bytes that a single token stands for, which may be part of a character.

The bytes of an answer's tokens, joined, are the answer's text in UTF-8, apart from a first space that some decoders
strip. A decoded token would not do: half a character decodes to U+FFFD, and a leading space may be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Decoders that leave the bytes of a single token as they are.
_NEUTRAL: Final = frozenset({"Fuse", "Strip"})
_KNOWN: Final = _NEUTRAL | {"ByteLevel", "ByteFallback", "Replace", "Metaspace"}


def byte_reader(backend: Tokenizer, decode: Callable[[Sequence[int]], str]) -> Callable[[int], bytes]:
    """Return a function from a token's id to its bytes, which remembers its results.

    It follows the tokenizer's decoder, if that is byte-level or SentencePiece's. Tokens of other decoders have the
    bytes of the text that `decode` returns.
    """
    steps = _steps(backend)
    if steps is None:
        return cache(lambda token_id: decode([token_id]).encode())

    @cache
    def read(token_id: int) -> bytes:
        piece = backend.id_to_token(token_id)
        if piece is None:
            return decode([token_id]).encode()
        for step in steps:
            match step["type"]:
                case "ByteLevel":
                    return _of_byte_level(piece)
                case "ByteFallback" if (byte := _BYTE.fullmatch(piece)) is not None:
                    return bytes.fromhex(byte[1])
                case "Replace":
                    piece = piece.replace(step["pattern"]["String"], step["content"])
                case "Metaspace":
                    piece = piece.replace(step["replacement"], " ")
        return piece.encode()

    return read


def _steps(backend: Tokenizer) -> Sequence[Mapping[str, Any]] | None:
    """Return the steps of the tokenizer's decoder; None if there are none, or others than `_KNOWN`."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    is_known = all(step["type"] in _KNOWN and "Regex" not in step.get("pattern", {}) for step in steps)
    return steps if is_known else None


@cache
def _byte_of_char() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2): printable Latin-1 characters are their own bytes,
    and the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _of_byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    if all(char in table for char in piece):
        return bytes(table[char] for char in piece)
    return piece.encode()  # an added token that is no text of byte-level characters
