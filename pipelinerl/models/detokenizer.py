"""`IncrementalDetokenizer`: the text of a growing sample, token by token.

The pieces of text add up to the text that the tokenizer returns for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: The decoder's output for bytes that do not form a character (yet).
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Maximum number of tokens to wait for a complete character, more than any character has bytes. After that, the
#: undecided bytes are emitted as they are.
_MAX_UNDECIDED = 16


class IncrementalDetokenizer:
    """Converter of one sample's tokens to text, token by token.

    For each new token, it decodes a window of recent tokens twice, without and with the new token; the new text is what
    the second result adds. The window includes the tokens of the previous emission, since some decoders treat the first
    token specially.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # number of tokens in the window whose text was emitted
        self._emitted = ""  # the text that the tokens counted by `_read` decode to

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        undecided = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and undecided < _MAX_UNDECIDED:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return the text not emitted yet; bytes that form no character become U+FFFD."""
        if self._read == len(self._window):
            return ""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._window = self._window[self._read :]
        self._emitted = self._decode(self._window)
        self._read = len(self._window)
        return new
