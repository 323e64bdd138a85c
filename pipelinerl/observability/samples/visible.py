"""`visible`: makes model output safe to display on a terminal and in a page.

Model output is untrusted. Escape sequences can move the cursor or rename the window, direction marks can make a wrong
answer read as the right one, and zero-width characters can make two texts look alike. All of these are shown as
Python's escapes and have no effect.
"""

from __future__ import annotations

import unicodedata
from typing import Final

#: Ordinary layout characters, which stay unchanged.
_LAYOUT: Final = frozenset("\n\t")
#: Categories: control, format, surrogates, private, unassigned, and line separators.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible(text: str) -> str:
    r"""Replace every invisible character by an escape such as `\x1b` or `\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    """Return the same on one line, for names in a list."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
