"""`visible`: text that a model wrote, as it may be shown on a terminal and in a page.

What a model writes is hostile: escape sequences that move the cursor or rename the window, marks that turn the order of
characters round so that a wrong answer reads as the right one, characters without width that make two texts look alike.
All of them come out as the escapes that Python writes for them, and nothing of them works.
"""

from __future__ import annotations

import unicodedata
from typing import Final

#: Stay as they are: what lays out ordinary text.
_LAYOUT: Final = frozenset("\n\t")
#: Control and format characters, halves of surrogate pairs, private and unassigned ones, separators of lines.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible(text: str) -> str:
    """The text with every character that is not seen written as an escape, such as `\\x1b` or `\\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    """The same in one line, for a name that stands among others."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
