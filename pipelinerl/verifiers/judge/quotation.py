"""`Quotation`: text of others within a prompt, such that it cannot end its own quotation.

    === answer 5f0c9b3e7a41d2c8 begins ===
    the text, as it is
    === answer 5f0c9b3e7a41d2c8 ends ===

The mark in the fences is a hash of all that is quoted. So it needs no randomness, equal prompts are equal, and nobody
can write a text that holds its own mark: to find one is to find a fixed point of BLAKE2b, one try in 2^64. What servers
may take for control tokens of a chat template (`<|im_end|>`, `</s>`, `[INST]`, `<start_of_turn>`) gets a backslash, so
that no text ends its message; a cut is told outside the text.

Promises nothing of what a judge makes of the text that it reads within: a model that obeys a quotation is moved by it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final, final

_MARK_BYTES: Final = 8
#: Brackets that begin a control token in one chat template or another, of usual or full width.
_CONTROL: Final = re.compile(
    r"(?<=[<＜])(?=[|｜])|(?<=<)(?=/?(?:s|bos|eos|pad|unk|system|user|assistant|start_of_turn|end_of_turn|think|SYS)>)"
    r"|(?<=<<)(?=/?SYS)|(?<=\[)(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\])",
    re.IGNORECASE,
)


@final
class Quotation:
    """The texts of one prompt, quoted with one mark.

    Args:
        texts: by the label that their fences carry.
        most_chars: of each, so many are quoted.
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
    """Sixteen hexadecimal digits that stand in none of the texts."""
    tries = 0
    while True:
        joined = "\x1e".join([str(tries), *(f"{label}\x1f{text}" for label, text in texts.items())])
        mark = hashlib.blake2b(joined.encode(), digest_size=_MARK_BYTES).hexdigest()
        if not any(mark in text for text in texts.values()):
            return mark
        tries += 1
