"""`Quotation`: quotes untrusted text within a prompt, so that the text cannot end its own quotation.

    === answer 5f0c9b3e7a41d2c8 begins ===
    the text, as it is
    === answer 5f0c9b3e7a41d2c8 ends ===

The hexadecimal number in the fence lines, called the mark, is a hash of all quoted text. It needs no randomness, so
equal prompts stay equal. A text cannot contain its own mark unless it is a fixed point of BLAKE2b (probability 2^-64).
Strings that servers may take for control tokens of a chat template (`<|im_end|>`, `</s>`, `[INST]`, `<start_of_turn>`)
get a backslash, so that no text ends its message. If a text is cut, a note outside the quotation says so.

Quoting does not make the judge ignore the text: a model that obeys instructions in a quotation is still influenced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final, final

_MARK_BYTES: Final = 8
#: Brackets that begin a control token in some chat template, of usual or full width.
_CONTROL: Final = re.compile(
    r"(?<=[<＜])(?=[|｜])|(?<=<)(?=/?(?:s|bos|eos|pad|unk|system|user|assistant|start_of_turn|end_of_turn|think|SYS)>)"
    r"|(?<=<<)(?=/?SYS)|(?<=\[)(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\])",
    re.IGNORECASE,
)


@final
class Quotation:
    """The texts of one prompt, all quoted with the same mark.

    Args:
        texts: the texts, by the label in their fence lines.
        most_chars: number of characters quoted of each text.
    """

    def __init__(self, texts: Mapping[str, str], *, most_chars: int) -> None:
        self._most_chars = most_chars
        plain = {label: text.encode("utf-8", "replace").decode() for label, text in texts.items()}
        self.mark = _mark_of(plain)
        self.blocks: Mapping[str, str] = {label: self._block(label, text) for label, text in plain.items()}

    def _block(self, label: str, text: str) -> str:
        cut = f", cut after {self._most_chars} characters" if len(text) > self._most_chars else ""
        shown = _CONTROL.sub(r"\\", text[: self._most_chars])
        return f"=== {label} {self.mark} begins{cut} ===\n{shown}\n=== {label} {self.mark} ends ==="


def _mark_of(texts: Mapping[str, str]) -> str:
    """Return sixteen hexadecimal digits that occur in none of the texts."""
    tries = 0
    while True:
        joined = "\x1e".join([str(tries), *(f"{label}\x1f{text}" for label, text in texts.items())])
        mark = hashlib.blake2b(joined.encode(), digest_size=_MARK_BYTES).hexdigest()
        if not any(mark in text for text in texts.values()):
            return mark
        tries += 1
