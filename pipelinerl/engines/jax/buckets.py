"""`Buckets`: the few shapes that a JAX engine runs, since XLA compiles a program for each shape.

    rows of a step      16, 32, 64, … slots
    lengths             128, 256, 512, … context: attended length of a step, padded length of a prompt, copied length
    prompts at once     1, 4, 16, … of a length, within the prefill's budget of padded tokens

Doubling wastes less than half of a step's rows and lengths; prompts are computed only once, so fewer sizes suffice. The
number of programs grows with the logarithms of slots and context, and `num_programs` bounds it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Self, final

_LEAST_ROWS: Final = 16
_LEAST_LENGTH: Final = 128


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that are compiled, ascending; `prompts[i]` are the numbers of prompts at once for length
    `lengths[i]`.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, *, rows: int, context: int, prefill_tokens: int) -> Self:
        """Return the sizes for `rows` rows of `context` tokens, and prefills of at most `prefill_tokens` padded
        tokens.
        """
        lengths = _doubling(_LEAST_LENGTH, context)
        at_once = [max(1, min(rows, prefill_tokens // length)) for length in lengths]
        prompts = tuple(tuple(4**i for i in range((most.bit_length() + 1) // 2)) for most in at_once)
        return cls(_doubling(_LEAST_ROWS, rows), lengths, prompts)

    @property
    def num_programs(self) -> int:
        """The most programs that are ever compiled: steps, sampling with and without truncation, prefills, copies."""
        steps = len(self.rows) * len(self.lengths) + 2 * len(self.rows)
        return steps + sum(map(len, self.prompts)) + len(self.lengths)

    def rows_for(self, rows: int) -> int:
        """Return the number of rows to run for a step of `rows` rows: the smallest compiled size that holds them."""
        return self.rows[bisect_left(self.rows, rows)]

    def length_for(self, length: int) -> int:
        """Return the smallest length that holds `length` tokens."""
        return self.lengths[bisect_left(self.lengths, length)]

    def prompts_at(self, length: int) -> tuple[int, ...]:
        """Return the possible numbers of prompts, padded to `length` (one of `lengths`), that run at once."""
        return self.prompts[self.lengths.index(length)]


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Return least, 2 · least, … below `most`, and then `most` itself."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], most)
