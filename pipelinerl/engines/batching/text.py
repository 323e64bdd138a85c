"""`TextWindow`: the text of one sample as it grows, for stop strings and streaming.

Promises that no text from a stop string on is ever shown, also when the string arrives in parts: text that may be the
beginning of one is held back until it is decided.
"""

from __future__ import annotations

from typing import Protocol, final


class Detokenizer(Protocol):
    """Turns token ids into text one at a time; holds back incomplete characters."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly empty."""
        ...

    def flush(self) -> str:
        """What was still held back."""
        ...


@final
class TextWindow:
    """Text of one sample.

    Args:
        detokenizer: a fresh one.
        stops: strings that end the sample; the text is cut before the first of them.
    """

    __slots__ = ("_detokenizer", "_longest_stop", "_shown", "_stopped", "_stops", "text")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest_stop = max((len(stop) for stop in stops), default=0)
        self._shown = 0
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Append a token's text. Returns whether it completed a stop string."""
        return self._append(self._detokenizer.push(token_id))

    def close(self) -> None:
        """No token follows: an incomplete character is shown as what it is."""
        if not self._stopped:
            self._append(self._detokenizer.flush())
            self._stopped = True

    def take(self) -> str:
        """Text that is certain and was not taken before."""
        end = len(self.text) if self._stopped else len(self.text) - self._held_back()
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _append(self, new: str) -> bool:
        if not new:
            return False
        # A stop string may have begun before `new`, but ends within it.
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        ends = [at for at in (self.text.find(stop, start) for stop in self._stops) if at >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self._stopped = True
        return self._stopped

    def _held_back(self) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0
